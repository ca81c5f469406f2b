#include "trireme/comm/device_watch.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/comm/cause.h"

namespace trireme::comm {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(100);
/// How long after the loss of a peer the device may still finish the operation: the peer may have done its
/// part before.
constexpr double kLastChance_s = 1.0;

}  // namespace

DeviceWatch::DeviceWatch(std::unique_ptr<WatchedDevice> device, double timeout_s, LostPeer lost_peer,
                         Expired expired)
    : device_(std::move(device)),
      timeout_s_(timeout_s),
      lost_peer_(std::move(lost_peer)),
      expired_(std::move(expired)),
      thread_([this] { run(); }) {}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void DeviceWatch::enqueued(const Operation& operation) {
  if (!device_->takes_events()) return;
  const std::lock_guard lock(mutex_);
  std::unique_ptr<DeviceEvent> event;
  if (spare_.empty()) {
    event = device_->make_event();
  } else {
    event = std::move(spare_.back());
    spare_.pop_back();
  }
  event->record();
  pending_.push_back({std::move(event), operation, monotonic_seconds()});
}

void DeviceWatch::run() {
  std::optional<Verdict> verdict;
  std::shared_ptr<void> entered;
  {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, kPoll, [this] { return stopping_; })) {
      try {
        if (!entered) entered = device_->enter_thread();
        verdict = look(lock);
      } catch (const std::exception& error) {
        verdict = {.operation = pending_.empty() ? Operation{"device", 0, "?"} : pending_.front().operation,
                   .elapsed_s = 0.0,
                   .reason = fmt::format("failed on its device ({})", cause_of(error))};
      }
      if (verdict) break;
    }
  }
  if (verdict) expired_(verdict->operation, verdict->elapsed_s, verdict->reason);
}

/// The verdict on the oldest operation when it is late or cannot end; none otherwise. Throws when the device
/// has failed.
std::optional<DeviceWatch::Verdict> DeviceWatch::look(std::unique_lock<std::mutex>& lock) {
  retire_finished();
  if (pending_.empty()) return std::nullopt;
  const double now = monotonic_seconds();
  const Pending& oldest = pending_.front();
  const double elapsed = now - std::max(oldest.since, last_done_);
  if (elapsed >= timeout_s_) return Verdict{oldest.operation, elapsed, {}};
  lock.unlock();  // it reads files, and operations shall not wait for that
  const std::string lost = lost_peer_();
  lock.lock();
  if (lost.empty()) {
    peer_lost_at_.reset();
    return std::nullopt;
  }
  if (!peer_lost_at_) peer_lost_at_ = now;
  if (now - std::max(*peer_lost_at_, last_done_) < kLastChance_s) return std::nullopt;
  return Verdict{oldest.operation, elapsed, fmt::format("lost a peer: {}", lost)};
}

void DeviceWatch::retire_finished() {
  while (!pending_.empty() && pending_.front().event->passed()) {
    spare_.push_back(std::move(pending_.front().event));
    pending_.pop_front();
    last_done_ = monotonic_seconds();
  }
}

}  // namespace trireme::comm
