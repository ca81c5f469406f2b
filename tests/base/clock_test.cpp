#include "trireme/base/clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <regex>
#include <thread>

namespace trireme {
namespace {

TEST(Clock, MonotonicSecondsCountSleep) {
  const double before = monotonic_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double elapsed = monotonic_seconds() - before;
  EXPECT_GE(elapsed, 0.020);
  EXPECT_LT(elapsed, 20.0);
}

TEST(Clock, TimestampIsRfc3339WithMicroseconds) {
  const std::regex shape(R"(20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-6]\d\.\d{6}Z)");
  EXPECT_TRUE(std::regex_match(utc_timestamp(), shape)) << utc_timestamp();
}

TEST(Clock, TimestampsSortAsTextInTheOrderOfTime) {
  const std::string first = utc_timestamp();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_LT(first, utc_timestamp());
}

TEST(Clock, CompactTimestampFitsIntoFileNames) {
  EXPECT_TRUE(std::regex_match(utc_compact(), std::regex(R"(20\d{6}-\d{6}Z)"))) << utc_compact();
}

TEST(Clock, SecondsSinceExecGrowWithTheMonotonicClock) {
  const double age = seconds_since_exec(), now = monotonic_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_GE(age, -0.02);  // the kernel counts in ticks of 10 ms
  EXPECT_NEAR(seconds_since_exec() - age, monotonic_seconds() - now, 0.02);
}

}  // namespace
}  // namespace trireme
