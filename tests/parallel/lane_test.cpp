// What a lane does where there are no streams; with streams it is measured on GPUs.
#include "trireme/parallel/lane.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace trireme::parallel {
namespace {

std::function<void()> work_of(int64_t ms) {
  return [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
}

TEST(Lane, RunsWorkAtOnceOnACpu) {
  Lane lane(c10::kCPU, /*beside=*/true);
  int done = 0;
  const Lane::Mark mark = lane.run([&] { ++done; });
  EXPECT_EQ(done, 1);
  lane.wait(mark);
  Lane::follow(mark, c10::kCPU);
}

TEST(Lane, CountsAllCommunicationAsExposedThere) {
  Lane lane(c10::kCPU, true);
  lane.run(work_of(5));
  EXPECT_EQ(lane.take_times().busy_ms, 0.0) << "not measured";
  lane.measure(true);
  lane.run(work_of(5));
  lane.run_untimed(work_of(500));
  lane.run(work_of(5));
  const LaneTimes times = lane.take_times();
  EXPECT_GE(times.busy_ms, 10.0);
  EXPECT_LT(times.busy_ms, 500.0);
  EXPECT_EQ(times.busy_ms, times.exposed_ms);
  EXPECT_EQ(times.hidden_share(), 0.0);
  EXPECT_EQ(lane.take_times().busy_ms, 0.0) << "they were taken";
}

TEST(LaneTimes, HiddenShareIsWhatNobodyWaitedFor) {
  LaneTimes times{8.0, 1.0};
  times += {2.0, 1.5};
  EXPECT_DOUBLE_EQ(times.hidden_share(), 0.75);
  EXPECT_EQ(LaneTimes{}.hidden_share(), 0.0);
}

}  // namespace
}  // namespace trireme::parallel
