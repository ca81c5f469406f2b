// Averages of parameters (optim.ema): validation is done with them, training is not touched by them, and they
// are the same for every policy and through a checkpoint.
#include "tests/train/trainer_fixture.h"

namespace trireme::train {
namespace {

using Averages = TrainerTest;

std::vector<double> validations(const Recorder& recorder) {
  std::vector<double> losses;
  for (const StepRecord& step : recorder.steps) {
    if (step.val_loss) losses.push_back(*step.val_loss);
  }
  return losses;
}

TEST_F(Averages, AreValidatedAndChangeNoBitOfTraining) {
  config_.train = {.steps = 6, .global_batch = 12, .micro_batch = 3, .val_every = 2, .val_batches = 2};
  run(2);
  const std::string digest = recorder_.summary.weights_digest;
  const std::vector<double> plain = validations(recorder_);
  config_.optim.ema = 0.8;
  std::vector<double> averaged;
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    run(2);
    EXPECT_EQ(recorder_.summary.weights_digest, digest) << plan::name(policy);
    if (averaged.empty()) averaged = validations(recorder_);
    EXPECT_EQ(validations(recorder_), averaged) << plan::name(policy);
  }
  ASSERT_EQ(averaged.size(), plain.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NE(averaged[i], plain[i]);
    EXPECT_GT(averaged[i], plain[i]) << "while the loss falls fast an average lags behind";
  }
}

TEST_F(Averages, OfASingleStepAreItsParameters) {
  config_.train = {.steps = 1, .global_batch = 8, .val_batches = 2};
  run(2);
  const std::vector<double> plain = validations(recorder_);
  config_.optim.ema = 0.99;
  run(2);
  EXPECT_EQ(validations(recorder_), plain);
}

}  // namespace
}  // namespace trireme::train
