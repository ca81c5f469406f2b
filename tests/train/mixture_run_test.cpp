// Runs on data.mixture: shares, validation of each source, resume.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"
#include "trireme/comm/agree.h"

namespace trireme::train {
namespace {

class MixtureRun : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    std::ofstream out(folder_ / "letters.txt");
    for (int line = 0; line < 120; ++line) out << "abcdefghijklmnopqrstuvwxyz"[line % 26] << " is a letter\n";
    out.close();
    config_.data.path = plan::DataConfig{}.path;
    mix(0.75);
  }

  void mix(double weight) {
    config_.data.mixture.sources = {{"letters", (folder_ / "letters.txt").string(), 1.0 - weight},
                                    {"rowers", (folder_ / "text").string(), weight}};
  }
};

TEST_F(MixtureRun, RecordsSharesAndValidatesEachSource) {
  run(2, false);
  for (const StepRecord& step : recorder_.steps) {
    ASSERT_EQ(step.sources.size(), 2u);
    EXPECT_EQ(step.sources[0].name, "letters");
    EXPECT_EQ(step.sources[0].samples + step.sources[1].samples, 8 * step.step);
    for (const SourceUse& source : step.sources)
      EXPECT_LT(std::fabs(static_cast<double>(source.samples) -
                          source.share * 8.0 * static_cast<double>(step.step)),
                1.0);
    if (!step.val_loss) continue;
    const double letters = step.val_metrics.at("loss/letters"), rowers = step.val_metrics.at("loss/rowers");
    EXPECT_NE(letters, rowers);
    EXPECT_NEAR(*step.val_loss, 0.25 * letters + 0.75 * rowers, 1e-9);
  }
  EXPECT_GT(recorder_.summary.sources[0].epochs, 0.2);
  EXPECT_DOUBLE_EQ(recorder_.summary.sources[1].share, 0.75);
}

TEST_F(MixtureRun, GoesOnExactly) {
  for (const int64_t ranks : {1, 2}) expect_exact(ranks, std::to_string(ranks));
}

TEST_F(MixtureRun, OtherRanksReadTheSameSamples) {
  run(1, false);
  const std::vector<StepRecord> alone = recorder_.steps;
  std::filesystem::remove_all(checkpoints());
  run(1, false, 5);
  run(2, true);
  for (const StepRecord& step : recorder_.steps) {
    const StepRecord& same = alone[static_cast<size_t>(step.step) - 1];
    EXPECT_NEAR(step.loss, same.loss, 1e-5 * same.loss) << step.step;
    EXPECT_EQ(step.sources[1].samples, same.sources[1].samples);
  }
}

TEST_F(MixtureRun, AMonitorMayBeTheLossOfASource) {
  config_.train.early_stop = 1;
  config_.train.val_every = 1;
  config_.train.monitor = "loss/letters";
  config_.optim.lr = 1.0;
  run(1, false);
  ASSERT_TRUE(recorder_.summary.early_end);
  EXPECT_EQ(recorder_.summary.early_end->metric, "loss/letters");
  config_.train.monitor = "loss/words";
  EXPECT_THROW(run(1, false), ConfigError);
}

TEST_F(MixtureRun, RefusesOtherWeightsOnResumeAndSourcesWithoutASample) {
  run(1, false, 5);
  mix(0.5);
  EXPECT_THROW(run(1, true), ConfigError);
  std::ofstream(folder_ / "short.txt") << "too short for a window of 32";
  config_.data.mixture.sources[0].path = (folder_ / "short.txt").string();
  EXPECT_THROW(run(1, false), ConfigError);
}

}  // namespace
}  // namespace trireme::train
