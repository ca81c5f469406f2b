#include "trireme/launch/restarts.h"

#include <gtest/gtest.h>

#include <csignal>
#include <limits>

#include "trireme/base/clock.h"

namespace trireme::launch {
namespace {

JobEnd ended_by(const RankExit& exit) {
  return {.code = exit_code(exit), .cause = exit};
}

TEST(MayStartAgain, AfterSignalsLostPeersLostMachinesAndWhatHasNoCode) {
  for (const int number : {SIGKILL, SIGSEGV, SIGABRT, SIGBUS})
    EXPECT_TRUE(may_start_again(ended_by({.end = {.signal = number}}))) << number;
  for (const int code : {1, 3, 5, 99})
    EXPECT_TRUE(may_start_again(ended_by({.end = {.code = code}}))) << code;
  EXPECT_TRUE(may_start_again(ended_by({.end = {.signal = SIGKILL}, .starved = true})));
}

TEST(MayStartAgain, NotWhenItWouldEndSoAgainOrWasAskedFor) {
  EXPECT_FALSE(may_start_again({.code = 0}));
  for (const int code : {2, 4, 6, 7, 8, 75, 130, 143})
    EXPECT_FALSE(may_start_again(ended_by({.end = {.code = code}}))) << code;
  EXPECT_FALSE(may_start_again(ended_by({.end = {.signal = SIGTERM}}))) << "somebody stopped that rank";
}

TEST(Restarts, WaitTwiceAsLongEachTimeUpToAMinute) {
  Restarts restarts(std::numeric_limits<int64_t>::max(), 1.0);
  for (const double delay : {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0}) EXPECT_EQ(restarts.take(), delay);
  for (int i = 0; i < 5000; ++i) restarts.take();
  EXPECT_EQ(restarts.take(), 60.0);
  EXPECT_EQ(Restarts(1, 90.0).take(), 90.0) << "as was asked for";
}

TEST(Restarts, AreUsedUpUnlessThereIsProgress) {
  Restarts restarts(2, 1.0);
  restarts.take();
  EXPECT_TRUE(restarts.left());
  restarts.take();
  EXPECT_FALSE(restarts.left());
  restarts.note_progress();
  EXPECT_TRUE(restarts.left());
  EXPECT_EQ(restarts.take(), 1.0);
  EXPECT_FALSE(Restarts(0, 1.0).left());
}

TEST(Launcher, PausesAsLongAsItIsToldOrUntilASignal) {
  Launcher launcher;
  const double began = monotonic_seconds();
  EXPECT_FALSE(launcher.pause(0.05));
  EXPECT_GE(monotonic_seconds() - began, 0.05);
  ::raise(SIGTERM);
  EXPECT_EQ(launcher.pause(1000.0), SIGTERM);
}

}  // namespace
}  // namespace trireme::launch
