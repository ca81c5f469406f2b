// The records of steps of a run that was killed and goes on: each once, and each what it was.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/spawn.h"
#include "tests/train/resume_fixture.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/report/run_dir.h"
#include "trireme/train/saved_record.h"

namespace trireme::train {
namespace {

TEST(SavedRecord, ComesBackAsItWas) {
  using Json = nlohmann::json;
  StepRecord record;
  record.grad_norm = INFINITY;
  record.lr = 1e-3;
  record.tokens = 768;
  record.loss_scale = 65536.0;
  record.skipped = true;
  const auto saved = Json::parse(record_to_json(record).dump());
  const StepRecord same = record_from_json(saved, 3, 0.1, "test");
  EXPECT_EQ(record_to_json(same), record_to_json(record));
  EXPECT_EQ(same.grad_norm, INFINITY);
  EXPECT_EQ(same.loss_scale, 65536.0);
  EXPECT_FALSE(same.communication_ms.has_value());
  record.grad_norm = std::copysign(NAN, -1.0);  // as inf - inf is on x86
  EXPECT_TRUE(
      std::isnan(record_from_json(Json::parse(record_to_json(record).dump()), 3, 0.1, "test").grad_norm));
  for (const char* key : {"grad_norm", "skipped", "tokens", "exposed_ms"}) {
    Json damaged = saved;
    damaged[key] = "x";
    EXPECT_THROW(record_from_json(damaged, 3, 0.1, "test"), DataError) << key;
    damaged.erase(key);
    EXPECT_THROW(record_from_json(damaged, 3, 0.1, "test"), DataError) << key;
  }
}

/// A process that is killed behind the save of a step and before its record is published.
class KilledBefore : public Sink {
 public:
  struct Killed {};
  KilledBefore(int64_t step, std::function<bool()> is_saved) : step_(step), is_saved_(std::move(is_saved)) {}
  void record(const StepRecord& step) override {
    if (step.step != step_) return;
    const double began = monotonic_seconds();
    while (!is_saved_()) {
      if (monotonic_seconds() - began > 120.0) throw std::runtime_error("the step was never saved");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw Killed();
  }
  void finish(const RunSummary&) override {}

 private:
  int64_t step_;
  std::function<bool()> is_saved_;
};

/// metrics.jsonl without what is measured.
std::vector<nlohmann::json> lines_of(const report::RunDirectory& directory) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(directory.file("metrics.jsonl")));
  for (std::string line; std::getline(text, line);) {
    lines.push_back(nlohmann::json::parse(line));
    for (const char* key : {"tokens_per_s", "tflops_per_rank", "step_ms", "steps_per_s", "peak_bytes",
                            "communication_ms", "exposed_ms", "communication_share", "checkpoint_ms"})
      lines.back().erase(key);
  }
  return lines;
}

/// With validation behind the save and without, in the last step, and of a loss that is scaled. An
/// asynchronous save is the first or the last one, which are never late.
TEST_F(Resume, MetricsHaveEveryStepOnceWhereverTheRunWasKilled) {
  config_.train.val_every = 4;
  config_.train.steps = 11;
  config_.train.sample_tokens = 0;
  const auto train_alone = [&](const report::RunDirectory& directory, bool resume, int64_t killed_before) {
    at::set_num_threads(1);
    TrainResult result;
    test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
      KilledBefore killer(killed_before, [&] {
        return std::filesystem::exists(
            directory.file(fmt::format("checkpoints/step-{:08}/COMMIT.json", killed_before)));
      });
      const auto files = report::make_run_files_sink(directory);
      TrainOptions mine = options();
      mine.sinks = {&killer, files.get()};
      mine.checkpoint_dir = directory.file("checkpoints");
      mine.resume = resume;
      try {
        result = train(mine, world);
      } catch (const KilledBefore::Killed&) {
      }
    });
    return result;
  };
  struct Case {
    int64_t every, killed_before;
    bool async, scaled;
  };
  for (const Case& given : {Case{8, 8, true, false}, Case{4, 8, false, false}, Case{6, 6, true, false},
                            Case{4, 11, true, false}, Case{4, 4, true, true}}) {
    config_.checkpoint.every = given.every;
    config_.checkpoint.async = given.async;
    config_.precision.scaling = given.scaled ? plan::LossScaling::kDynamic : plan::LossScaling::kNone;
    const auto whole = report::RunDirectory::create((folder_ / "runs").string(), "whole", {});
    const auto killed = report::RunDirectory::create((folder_ / "runs").string(), "killed", {});
    const RunSummary wanted = train_alone(whole, false, 0).summary;
    train_alone(killed, false, given.killed_before);
    EXPECT_EQ(lines_of(killed).size(), static_cast<size_t>(given.killed_before - 1));
    const RunSummary got = train_alone(killed, true, 0).summary;
    EXPECT_EQ(got.resumed_at, given.killed_before);
    EXPECT_EQ(lines_of(killed), lines_of(whole)) << "killed before " << given.killed_before;
    EXPECT_EQ(got.final_val_loss, wanted.final_val_loss);
    EXPECT_EQ(got.weights_digest, wanted.weights_digest);
    const std::string text = read_file(killed.file("metrics.jsonl"));
    train_alone(killed, true, 0);  // twice
    EXPECT_EQ(read_file(killed.file("metrics.jsonl")), text);
  }
}

}  // namespace
}  // namespace trireme::train
