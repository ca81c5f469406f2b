// Who waits for a GPU, and when the wait is given up; the GPU is one that the test moves on by hand.
#include "trireme/comm/device_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "trireme/base/clock.h"

namespace trireme::comm {
namespace {

using namespace std::chrono_literals;

/// How far the device has come, in operations; negative: it has failed.
using Progress = std::atomic<int64_t>;

/// The device's queue: takes `room` events, then blocks whoever records another one until it is opened.
/// Meanwhile it answers nobody else either, as CUDA.
class Queue {
 public:
  static constexpr int64_t kEndless = 1'000'000;

  void set_room(int64_t events) { room_ = events; }
  int64_t record() {
    const int64_t place = ++recorded_;
    std::unique_lock lock(mutex_);
    blocks_ = !open_ && place > room_;
    changed_.wait(lock, [this] { return !blocks_ || open_; });
    return place;
  }
  void wait_for_answer() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !blocks_ || open_; });
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int64_t> recorded_ = 0;
  int64_t room_ = kEndless;
  bool blocks_ = false, open_ = false;
};

class FakeEvent final : public DeviceEvent {
 public:
  FakeEvent(const Progress& done, Queue& queue) : done_(done), queue_(queue) {}
  void record() override { place_ = queue_.record(); }
  bool passed() override {
    queue_.wait_for_answer();
    if (done_ < 0) throw std::runtime_error("CUDA error: an illegal memory access was encountered");
    return done_ >= place_;
  }

 private:
  const Progress& done_;
  Queue& queue_;
  int64_t place_ = 0;
};

class FakeDevice final : public WatchedDevice {
 public:
  FakeDevice(const Progress& done, Queue& queue) : done_(done), queue_(queue) {}
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<FakeEvent>(done_, queue_); }
  bool takes_events() const override { return true; }
  std::shared_ptr<void> enter_thread() override { return std::make_shared<int>(); }

 private:
  const Progress& done_;
  Queue& queue_;
};

struct Expiry {
  int64_t sequence;
  std::string reason;
};

class Watched : public ::testing::Test {
 protected:
  std::unique_ptr<DeviceWatch> watch(double timeout_s) {
    return std::make_unique<DeviceWatch>(
        std::make_unique<FakeDevice>(done_, queue_), timeout_s,
        [this] { return peer_lost_ ? std::string("rank 2 (process 77) has died") : std::string(); },
        [this](const Operation& operation, double, const std::string& reason) {
          expiry_.set_value({operation.sequence, reason});
        });
  }
  static void enqueue(DeviceWatch& watch, int64_t count) {
    for (int64_t i = 1; i <= count; ++i) watch.enqueued({"all_reduce", i, "dp"});
  }

  Progress done_ = 0;
  Queue queue_;
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

/// A host that is blocked by a device with room for `room` events, and goes on at the end of the scope.
class BlockedHost {
 public:
  BlockedHost(DeviceWatch& watch, Queue& queue, int64_t room) : queue_(queue) {
    queue.set_room(room);
    thread_ = std::jthread([&watch, room] {
      for (int64_t i = 1; i <= room + 1; ++i) watch.enqueued({"all_reduce", i, "dp"});
    });
  }
  BlockedHost(const BlockedHost&) = delete;
  BlockedHost& operator=(const BlockedHost&) = delete;
  ~BlockedHost() { queue_.open(); }

 private:
  Queue& queue_;
  std::jthread thread_;
};

TEST_F(Watched, TheDeadlineIsKeptWhileTheDeviceBlocksTheHost) {
  for (const int64_t room : {0, 1}) {
    SCOPED_TRACE(room);
    Queue queue;
    std::promise<Expiry> promise;
    std::future<Expiry> expired = promise.get_future();
    DeviceWatch watched(
        std::make_unique<FakeDevice>(done_, queue), 0.3, [] { return std::string(); },
        [&](const Operation& operation, double, const std::string& reason) {
          promise.set_value({operation.sequence, reason});
        });
    const BlockedHost host(watched, queue, room);
    ASSERT_EQ(expired.wait_for(3s), std::future_status::ready);
    const Expiry expiry = expired.get();
    EXPECT_EQ(expiry.sequence, 1) << "none is done";
    EXPECT_EQ(expiry.reason, "");
  }
}

TEST_F(Watched, ALostPeerIsNoticedWhileTheDeviceBlocksTheHost) {
  const auto watched = watch(300.0);
  const BlockedHost host(*watched, queue_, 1);
  peer_lost_ = true;
  ASSERT_EQ(expired_.wait_for(4s), std::future_status::ready);
  EXPECT_EQ(expired_.get().reason, "lost a peer: rank 2 (process 77) has died");
}

TEST_F(Watched, WhatTheDeviceFinishedWhileItDidNotAnswerIsNotLate) {
  const auto watched = watch(0.5);
  const BlockedHost host(*watched, queue_, 1);
  std::this_thread::sleep_for(800ms);
  done_ = 2;
  queue_.open();
  EXPECT_EQ(expired_.wait_for(1500ms), std::future_status::timeout);
}

}  // namespace
}  // namespace trireme::comm
