#include "trireme/train/early_stop.h"

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"

namespace trireme::train {
namespace {

EarlyStop stop_after(int64_t patience, double min_delta, const std::vector<double>& losses) {
  EarlyStop stop({.early_stop = patience, .early_stop_min_delta = min_delta});
  for (size_t i = 0; i < losses.size(); ++i) {
    EXPECT_FALSE(stop.end()) << "before loss " << i;
    stop.see(10 * static_cast<int64_t>(i + 1), losses[i]);
  }
  return stop;
}

TEST(EarlyStop, CountsValidationsThatAreNoBetterThanTheBest) {
  EXPECT_FALSE(stop_after(2, 0.0, {3.0, 2.0, 2.5}).end());
  const auto end = stop_after(2, 0.0, {3.0, 2.0, 2.5, 2.0}).end();
  ASSERT_TRUE(end) << "as good is not better";
  EXPECT_EQ(end->step, 40);
  EXPECT_EQ(end->best_step, 20);
  EXPECT_EQ(end->best_value, 2.0);
  EXPECT_EQ(end->validations, 2);
  EXPECT_FALSE(stop_after(2, 0.0, {3.0, 2.0, 2.5, 1.9, 2.0}).end()) << "a better one begins anew";
}

/// Slow headway counts once it adds up.
TEST(EarlyStop, ALossIsBetterByMoreThanMinDelta) {
  EXPECT_TRUE(stop_after(1, 0.5, {3.0, 2.5}).end());
  EXPECT_FALSE(stop_after(2, 0.5, {3.0, 2.75, 2.25}).end());
}

TEST(EarlyStop, ALossThatIsNotFiniteIsNeverBetter) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto end = stop_after(2, 0.0, {nan, -std::numeric_limits<double>::infinity()}).end();
  ASSERT_TRUE(end);
  EXPECT_FALSE(end->best_value);
  EXPECT_FALSE(stop_after(0, 0.0, {1.0, 1.0, 1.0}).end()) << "it is off";
}

TEST(EarlyStop, GoesOnFromItsState) {
  const EarlyStop first = stop_after(2, 0.0, {3.0, 2.0, 2.5});
  EarlyStop second = stop_after(2, 0.0, {});
  second.restore(nlohmann::json::parse(first.state().dump()), "x");
  EXPECT_EQ(second.last_seen(), 30);
  second.see(40, 2.5);
  ASSERT_TRUE(second.end());
  EXPECT_EQ(second.end()->best_step, 20);
  for (const char* wrong : {"{}", R"({"best": "2", "best_step": 1, "step": 1, "no_better": 0})",
                            R"({"best": 2, "best_step": 1, "step": 1, "no_better": -1})"})
    EXPECT_THROW(second.restore(nlohmann::json::parse(wrong), "x"), DataError) << wrong;
}

/// A rate that is too high: the loss falls unsteadily, and soon only a little.
class EarlyStopRun : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    config_.train.steps = 24;
    config_.train.val_every = 2;
    config_.optim.lr = 0.1;
    config_.checkpoint.every = 3;
    config_.checkpoint.keep = 0;
  }

  /// By the rule, from the records of a run that did not stop; 0: it never would.
  int64_t end_by_rule(int64_t patience, double min_delta) const {
    std::optional<double> best;
    int64_t since = 0;
    for (const StepRecord& step : recorder_.steps) {
      if (!step.val_loss) continue;
      const bool better = !best || *step.val_loss < *best - min_delta;
      since = better ? 0 : since + 1;
      if (better) best = step.val_loss;
      if (since == patience) return step.step;
    }
    return 0;
  }

  /// The steps of a run without train.early_stop, and where it should have ended.
  std::vector<StepRecord> whole(int64_t ranks) {
    config_.train.early_stop = 0;
    config_.train.early_stop_min_delta = 0.0;
    std::filesystem::remove_all(checkpoints());
    run(ranks, false);
    ends_at_ = end_by_rule(kPatience, kMinDelta);
    std::vector<StepRecord> steps = recorder_.steps;
    std::filesystem::remove_all(checkpoints());
    config_.train.early_stop = kPatience;
    config_.train.early_stop_min_delta = kMinDelta;
    return steps;
  }

  static constexpr int64_t kPatience = 2;
  static constexpr double kMinDelta = 0.1;
  int64_t ends_at_ = 0;
};

TEST_F(EarlyStopRun, EndsWellAtTheStepOfTheRuleUnderEveryPolicyAndPipeline) {
  using plan::PolicyName;
  const auto expect_prefix = [&](int64_t ranks, const std::string& what) {
    std::vector<StepRecord> steps = whole(ranks);
    ASSERT_GT(ends_at_, 6) << what << ": a loss was better than the first";
    ASSERT_LT(ends_at_, 24) << what;
    const TrainResult result = run(ranks, false);
    steps.resize(static_cast<size_t>(ends_at_));
    expect_same_steps(recorder_.steps, steps);
    EXPECT_EQ(result.stop_signal, 0) << what;
    EXPECT_EQ(result.summary.steps, ends_at_) << what;
    ASSERT_TRUE(result.summary.early_end) << what;
    EXPECT_EQ(result.summary.early_end->step, ends_at_) << what;
    EXPECT_EQ(result.summary.early_end->best_step, ends_at_ - 2 * kPatience) << what;
    EXPECT_TRUE(std::filesystem::exists(options().weights_path)) << what;
    EXPECT_TRUE(std::filesystem::exists(fmt::format("{}/step-{:08}", checkpoints(), ends_at_))) << what;
  };
  for (const PolicyName policy :
       {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kZero2, PolicyName::kZero3, PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    expect_prefix(2, std::string(plan::name(policy)));
  }
  config_.parallel.pp = 2;
  expect_prefix(2, "two stages");
  expect_prefix(4, "two stages of two ranks");
}

/// Wherever it is stopped: before, at, and after the validations that count.
TEST_F(EarlyStopRun, ResumesExactly) {
  const std::vector<StepRecord> steps = whole(2);
  const TrainResult without_stop = run(2, false);
  ASSERT_EQ(without_stop.summary.steps, ends_at_);
  for (int64_t stop_at = 1; stop_at < ends_at_; ++stop_at) {
    std::filesystem::remove_all(checkpoints());
    std::filesystem::remove(options().weights_path);
    ASSERT_EQ(run(2, false, stop_at).stop_signal, SIGTERM) << stop_at;
    const TrainResult resumed = run(2, true);
    EXPECT_EQ(resumed.summary.steps, ends_at_) << stop_at;
    EXPECT_EQ(resumed.summary.weights_digest, without_stop.summary.weights_digest) << stop_at;
    ASSERT_TRUE(resumed.summary.early_end) << stop_at;
    EXPECT_EQ(resumed.summary.early_end->best_value, without_stop.summary.early_end->best_value);
  }
}

/// A checkpoint is saved before the validation of its step, which counts all the same.
TEST_F(EarlyStopRun, GoesOnFromAnyCheckpointAsTheRunDidThen) {
  config_.checkpoint.every = 1;
  config_.checkpoint.async = false;
  whole(2);
  const TrainResult first = run(2, false);
  for (int64_t step = 1; step <= ends_at_; ++step) {
    const std::string checkpoint = fmt::format("{}/step-{:08}", checkpoints(), step);
    ASSERT_TRUE(std::filesystem::exists(checkpoint)) << step;
    const std::filesystem::path kept = folder_ / "kept";
    std::filesystem::remove_all(kept);
    std::filesystem::copy(checkpoints(), kept, std::filesystem::copy_options::recursive);
    resume_from_ = checkpoint;
    const TrainResult resumed = run(2, true);
    EXPECT_EQ(resumed.summary.steps, ends_at_) << step;
    EXPECT_EQ(resumed.summary.weights_digest, first.summary.weights_digest) << step;
    ASSERT_TRUE(resumed.summary.early_end) << step;
    std::filesystem::remove_all(checkpoints());
    std::filesystem::rename(kept, checkpoints());
  }
  resume_from_.clear();
  config_.train.early_stop = kPatience + 1;  // a run that ended early goes on with more patience
  EXPECT_GT(run(2, true).summary.steps, ends_at_);
}

TEST_F(EarlyStopRun, NeedsSomethingToValidateOn) {
  config_.train.early_stop = 2;
  config_.data.val_fraction = 0.001;
  EXPECT_THROW(run(2, false), ConfigError);
}

}  // namespace
}  // namespace trireme::train
