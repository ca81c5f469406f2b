// What a side does where there are no streams; with streams it is measured on GPUs.
#include "trireme/parallel/side_stream.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace trireme::parallel {
namespace {

std::function<void()> work_of(int64_t ms) {
  return [ms] { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
}

TEST(SideStream, RunsWorkAtOnceOnACpu) {
  SideStream side(c10::kCPU, /*beside=*/true);
  int done = 0;
  const SideStream::Event event = side.run([&] { ++done; });
  EXPECT_EQ(done, 1);
  side.wait(event);
  SideStream::follow(event, c10::kCPU);
}

TEST(SideStream, CountsAllCommunicationAsExposedThere) {
  SideStream side(c10::kCPU, true);
  side.run(work_of(5));
  EXPECT_EQ(side.take_times().busy_ms, 0.0) << "not measured";
  side.measure(true);
  side.run(work_of(5));
  side.run_untimed(work_of(500));
  side.run(work_of(5));
  const CommTimes times = side.take_times();
  EXPECT_GE(times.busy_ms, 10.0);
  EXPECT_LT(times.busy_ms, 500.0);
  EXPECT_EQ(times.busy_ms, times.exposed_ms);
  EXPECT_EQ(times.hidden_share(), 0.0);
  EXPECT_EQ(side.take_times().busy_ms, 0.0) << "they were taken";
}

TEST(CommTimes, HiddenShareIsWhatNobodyWaitedFor) {
  CommTimes times{8.0, 1.0};
  times += {2.0, 1.5};
  EXPECT_DOUBLE_EQ(times.hidden_share(), 0.75);
  EXPECT_EQ(CommTimes{}.hidden_share(), 0.0);
}

}  // namespace
}  // namespace trireme::parallel
