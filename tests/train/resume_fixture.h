#pragma once
// A run that saves every few steps, that a signal stops, and that goes on; beside it the run that was never
// stopped.
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/spawn.h"
#include "tests/train/trainer_fixture.h"

namespace trireme::train {

/// Does something once a step is recorded, on rank 0.
class AfterStep : public Sink {
 public:
  explicit AfterStep(std::function<void(int64_t step)> body) : body_(std::move(body)) {}
  void record(const StepRecord& step) override { body_(step.step); }
  void finish(const RunSummary&) override {}

 private:
  std::function<void(int64_t)> body_;
};

class Resume : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.train.steps = 12;
    config_.train.micro_batch = 2;
    config_.train.val_every = 5;
    config_.train.sample_tokens = 0;
    config_.checkpoint.every = 4;
  }

  /// Trains; a signal comes when step `stop_at` is recorded, 0: never.
  TrainResult run(int64_t ranks, bool resume, int64_t stop_at = 0) {
    at::set_num_threads(1);
    recorder_ = {};
    stop_ = 0;
    AfterStep stopper([&](int64_t step) {
      if (step == stop_at) stop_ = SIGTERM;
      if (after_step_) after_step_(step);
    });
    TrainResult result;
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      TrainOptions mine = options();
      mine.sinks = {&recorder_, &stopper};
      mine.stop_signal = world->rank() == 0 ? &stop_ : nullptr;
      mine.checkpoint_dir = world->rank() == 0 ? checkpoints() : std::string();
      mine.resume = resume;
      mine.resume_from = world->rank() == 0 ? resume_from_ : std::string();
      try {
        const TrainResult outcome = train(mine, world);
        if (world->rank() == 0) result = outcome;
      } catch (const comm::FailedElsewhere&) {
      }
    });
    return result;
  }

  std::string checkpoints() const { return (folder_ / "checkpoints").string(); }

  /// `config_` trained without a stop, and then with two; the same steps, losses and weights.
  void expect_exact(int64_t ranks, const std::string& what) {
    std::filesystem::remove_all(checkpoints());
    const TrainResult whole = run(ranks, false);
    const std::vector<StepRecord> steps = recorder_.steps;
    ASSERT_EQ(steps.size(), 12u) << what;
    EXPECT_EQ(whole.summary.checkpoints + whole.summary.checkpoints_late, 3) << what;
    std::filesystem::remove_all(checkpoints());

    std::vector<StepRecord> pieces;
    const auto go_on = [&](bool resume, int64_t stop_at) {
      const TrainResult result = run(ranks, resume, stop_at);
      pieces.insert(pieces.end(), recorder_.steps.begin(), recorder_.steps.end());
      return result;
    };
    const TrainResult first = go_on(false, 2);
    EXPECT_EQ(first.stop_signal, SIGTERM) << what;
    EXPECT_TRUE(first.resumable) << what;
    EXPECT_LT(first.summary.steps, 6) << what;
    EXPECT_EQ(go_on(true, 7).summary.resumed_at, first.summary.steps) << what;
    const TrainResult last = go_on(true, 0);
    EXPECT_EQ(last.summary.weights_digest, whole.summary.weights_digest) << what;
    EXPECT_EQ(last.summary.final_val_loss, whole.summary.final_val_loss) << what;
    // A stopped step does not validate.
    for (StepRecord& record : pieces) record.val_loss = steps[static_cast<size_t>(record.step) - 1].val_loss;
    expect_same_steps(pieces, steps);
    // A run that is complete has nothing to do.
    const TrainResult again = run(ranks, true);
    EXPECT_TRUE(recorder_.steps.empty()) << what;
    EXPECT_EQ(again.summary.weights_digest, whole.summary.weights_digest) << what;
    EXPECT_EQ(again.summary.final_loss, whole.summary.final_loss) << what;
  }

  std::function<void(int64_t)> after_step_;
  std::string resume_from_;
};

}  // namespace trireme::train
