#include "trireme/precision/loss_scaler.h"

#include <gtest/gtest.h>

namespace trireme::precision {
namespace {

constexpr plan::LossScaleConfig kConfig{.initial = 1024.0, .window = 4, .hysteresis = 2, .minimum = 256.0};

void feed(LossScaler& scaler, bool finite, int times) {
  for (int i = 0; i < times; ++i) scaler.update(finite);
}

TEST(LossScaler, GrowsAfterAWindowOfFiniteSteps) {
  LossScaler scaler(kConfig, true);
  feed(scaler, true, 3);
  EXPECT_EQ(scaler.scale(), 1024.0);
  feed(scaler, true, 1);
  EXPECT_EQ(scaler.scale(), 2048.0);
  feed(scaler, true, 4);
  EXPECT_EQ(scaler.scale(), 4096.0);
}

TEST(LossScaler, FallsOnlyWhenPatienceIsUsedUpAndAtOnceFromThenOn) {
  LossScaler scaler(kConfig, true);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 1024.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 512.0);
  scaler.update(true);  // one finite step forgives nothing
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 256.0);
  EXPECT_EQ(scaler.skipped(), 3);
}

TEST(LossScaler, AWindowOfFiniteStepsGivesPatienceBack) {
  LossScaler scaler(kConfig, true);
  scaler.update(false);
  feed(scaler, true, 4);
  EXPECT_EQ(scaler.scale(), 2048.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 2048.0);
}

TEST(LossScaler, AnOverflowRestartsTheWindow) {
  LossScaler scaler(kConfig, true);
  feed(scaler, true, 3);
  scaler.update(false);
  feed(scaler, true, 3);
  EXPECT_EQ(scaler.scale(), 1024.0);
}

TEST(LossScaler, NeverFallsBelowItsMinimumAndCountsOverflowsInARow) {
  LossScaler scaler(kConfig, true);
  feed(scaler, false, 20);
  EXPECT_EQ(scaler.scale(), 256.0);
  EXPECT_EQ(scaler.overflows_in_a_row(), 20);
  scaler.update(true);
  EXPECT_EQ(scaler.overflows_in_a_row(), 0);
}

TEST(LossScaler, GoesOnFromItsState) {
  LossScaler whole(kConfig, true);
  for (int step = 0; step < 200; ++step) {
    LossScaler resumed(kConfig, true);
    resumed.set_state(whole.state());
    for (LossScaler* scaler : {&whole, &resumed}) scaler->update(step % 7 > 1);
    EXPECT_EQ(resumed.scale(), whole.scale());
    EXPECT_EQ(resumed.skipped(), whole.skipped());
    EXPECT_EQ(resumed.overflows_in_a_row(), whole.overflows_in_a_row());
  }
}

TEST(LossScaler, IsOneWhenSwitchedOff) {
  LossScaler scaler(kConfig, false);
  feed(scaler, false, 3);
  feed(scaler, true, 100);
  EXPECT_EQ(scaler.scale(), 1.0);
  EXPECT_EQ(scaler.skipped(), 0);
}

}  // namespace
}  // namespace trireme::precision
