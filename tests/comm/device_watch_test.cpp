// Who waits for a GPU, and when the wait is given up; the GPU is one that the test moves on by hand.
#include "trireme/comm/device_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>

#include "trireme/base/clock.h"

namespace trireme::comm {
namespace {

using namespace std::chrono_literals;

/// How far the device has come, in operations; negative: it has failed.
using Progress = std::atomic<int64_t>;

class FakeEvent final : public DeviceEvent {
 public:
  FakeEvent(const Progress& done, int64_t& recorded) : done_(done), recorded_(recorded) {}
  void record() override { place_ = ++recorded_; }
  bool passed() override {
    if (done_ < 0) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    return done_ >= place_;
  }

 private:
  const Progress& done_;
  int64_t& recorded_;
  int64_t place_ = 0;
};

class FakeDevice final : public WatchedDevice {
 public:
  explicit FakeDevice(const Progress& done) : done_(done) {}
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<FakeEvent>(done_, recorded_); }
  bool takes_events() const override { return true; }
  std::shared_ptr<void> enter_thread() override { return std::make_shared<int>(); }

 private:
  const Progress& done_;
  int64_t recorded_ = 0;
};

struct Expiry {
  int64_t sequence;
  std::string reason;
};

class Watched : public ::testing::Test {
 protected:
  std::unique_ptr<DeviceWatch> watch(double timeout_s) {
    return std::make_unique<DeviceWatch>(
        std::make_unique<FakeDevice>(done_), timeout_s,
        [this] { return peer_lost_ ? std::string("rank 2 (process 77) has died") : std::string(); },
        [this](const Operation& operation, double, const std::string& reason) {
          expiry_.set_value({operation.sequence, reason});
        });
  }
  static void enqueue(DeviceWatch& watch, int64_t count) {
    for (int64_t i = 1; i <= count; ++i) watch.enqueued({"all_reduce", i, "dp"});
  }

  Progress done_ = 0;
  std::atomic<bool> peer_lost_ = false;
  std::promise<Expiry> expiry_;
  std::future<Expiry> expired_ = expiry_.get_future();
};

TEST_F(Watched, TheOldestUnfinishedOperationPassesItsDeadline) {
  const auto watched = watch(0.3);
  enqueue(*watched, 3);
  done_ = 1;
  ASSERT_EQ(expired_.wait_for(3s), std::future_status::ready);
  const Expiry expiry = expired_.get();
  EXPECT_EQ(expiry.sequence, 2);
  EXPECT_EQ(expiry.reason, "");
}

TEST_F(Watched, AFailedDeviceIsAnErrorAndNotTheEndOfTheProcess) {
  const auto watched = watch(60.0);
  enqueue(*watched, 2);
  done_ = -1;
  ASSERT_EQ(expired_.wait_for(3s), std::future_status::ready);
  const Expiry expiry = expired_.get();
  EXPECT_EQ(expiry.sequence, 1);
  EXPECT_EQ(expiry.reason, "failed on its device (CUDA error: an illegal memory access was encountered)");
}

TEST_F(Watched, AWaitForALostPeerEndsLongBeforeTheDeadline) {
  const auto watched = watch(300.0);
  enqueue(*watched, 1);
  peer_lost_ = true;
  const double started = monotonic_seconds();
  ASSERT_EQ(expired_.wait_for(4s), std::future_status::ready);
  EXPECT_LT(monotonic_seconds() - started, 2.5) << "the launcher kills 5 s after a failure";
  EXPECT_EQ(expired_.get().reason, "lost a peer: rank 2 (process 77) has died");
}

TEST_F(Watched, WhatAPeerLeftFinishedIsNoFailure) {
  const auto watched = watch(300.0);
  enqueue(*watched, 4);
  peer_lost_ = true;
  for (int64_t i = 1; i <= 4; ++i) {
    EXPECT_EQ(expired_.wait_for(600ms), std::future_status::timeout) << "the device still moves on";
    done_ = i;
  }
  EXPECT_EQ(expired_.wait_for(1500ms), std::future_status::timeout) << "nothing is left to wait for";
}

}  // namespace
}  // namespace trireme::comm
