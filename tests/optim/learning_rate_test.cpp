#include "trireme/optim/learning_rate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "trireme/optim/optimizer.h"

namespace trireme::optim {
namespace {

plan::OptimConfig config(plan::LrSchedule schedule) {
  plan::OptimConfig result;
  result.lr = 1.0;
  result.min_lr = 0.1;
  result.warmup_steps = 10;
  result.schedule = schedule;
  return result;
}

TEST(LearningRate, WarmsUpLinearlyFromTheFirstStep) {
  for (const plan::LrSchedule schedule : plan::all_values<plan::LrSchedule>()) {
    if (schedule == plan::LrSchedule::kRange) continue;  // has none
    for (int64_t step = 1; step <= 10; ++step) {
      EXPECT_DOUBLE_EQ(learning_rate(config(schedule), step, 110), static_cast<double>(step) / 10.0);
    }
  }
}

TEST(LearningRate, FollowsItsScheduleToTheMinimum) {
  for (int64_t step = 11; step <= 110; ++step) {
    const double progress = static_cast<double>(step - 10) / 100.0;
    EXPECT_DOUBLE_EQ(learning_rate(config(plan::LrSchedule::kConstant), step, 110), 1.0);
    EXPECT_NEAR(learning_rate(config(plan::LrSchedule::kLinear), step, 110), 1.0 - 0.9 * progress, 1e-12);
    EXPECT_NEAR(learning_rate(config(plan::LrSchedule::kCosine), step, 110),
                0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * progress)), 1e-12);
  }
  EXPECT_NEAR(learning_rate(config(plan::LrSchedule::kCosine), 110, 110), 0.1, 1e-12);
}

TEST(LearningRate, DropsEverySoManySteps) {
  plan::OptimConfig drops = config(plan::LrSchedule::kSteps);
  drops.min_lr = 0.0;
  drops.step_every = 30;
  drops.step_factor = 0.5;
  const auto at = [&](int64_t step) { return learning_rate(drops, step, 110); };
  EXPECT_EQ(at(11), 1.0);
  EXPECT_EQ(at(40), 1.0);
  EXPECT_EQ(at(41), 0.5);
  EXPECT_EQ(at(70), 0.5);
  EXPECT_EQ(at(71), 0.25);
  EXPECT_EQ(at(110), 0.125);
  drops.min_lr = 0.3;
  EXPECT_EQ(at(110), 0.3);
}

TEST(LearningRate, DropsTwiceWhereNobodySaysHowOften) {
  plan::OptimConfig drops = config(plan::LrSchedule::kSteps);
  drops.min_lr = 0.0;
  for (const int64_t steps : {11, 12, 13, 100, 110}) {
    EXPECT_NEAR(learning_rate(drops, steps, steps), std::pow(0.1, std::min<int64_t>(2, steps - 11)), 1e-12);
  }
  EXPECT_EQ(learning_rate(drops, 40, 100), 1.0);
  EXPECT_NEAR(learning_rate(drops, 41, 100), 0.1, 1e-12);
}

TEST(LearningRate, OfARangeTestRisesByOneFactorFromTheSmallestToTheLargest) {
  plan::OptimConfig range = config(plan::LrSchedule::kRange);
  range.warmup_steps = 0;
  range.min_lr = 1e-4;
  EXPECT_DOUBLE_EQ(learning_rate(range, 1, 41), 1e-4);
  for (int64_t step = 1; step <= 40; ++step)
    EXPECT_NEAR(learning_rate(range, step + 1, 41) / learning_rate(range, step, 41), std::pow(10.0, 0.1),
                1e-12);
  EXPECT_DOUBLE_EQ(learning_rate(range, 41, 41), 1.0);
  EXPECT_EQ(learning_rate(range, 1, 1), 1.0);
}

TEST(LearningRate, NeedsNoWarmup) {
  plan::OptimConfig plain = config(plan::LrSchedule::kLinear);
  plain.warmup_steps = 0;
  EXPECT_GT(learning_rate(plain, 1, 10), 0.9);
  EXPECT_NEAR(learning_rate(plain, 10, 10), 0.1, 1e-12);
}

TEST(ClipFactor, ScalesDownOnly) {
  EXPECT_NEAR(clip_factor(4.0, 1.0), 0.25, 1e-6);
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(1e9, 0.0), 1.0) << "0 means no clipping";
  EXPECT_EQ(clip_factor(INFINITY, 1.0), 0.0);
  EXPECT_TRUE(std::isnan(clip_factor(std::nan(""), 1.0))) << "as on a device";
}

}  // namespace
}  // namespace trireme::optim
