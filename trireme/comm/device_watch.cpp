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
/// How often an operation may look late to the host alone. A process that was stopped for a while finds
/// operations late that its device finished long ago: it waits for the device's answer, but not for ever.
constexpr int64_t kLooksWithoutAnswer = 10;

}  // namespace

DeviceWatch::DeviceWatch(std::unique_ptr<WatchedDevice> device, double timeout_s, LostPeer lost_peer,
                         Expired expired)
    : device_(std::move(device)),
      timeout_s_(timeout_s),
      lost_peer_(std::move(lost_peer)),
      expired_(std::move(expired)),
      asks_device_([this] { ask_device(); }),
      keeps_deadline_([this] { keep_deadline(); }) {}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  keeps_deadline_.join();
  asks_device_.join();
}

void DeviceWatch::enqueued(const Operation& operation) {
  if (!device_->takes_events()) return;
  std::unique_ptr<DeviceEvent> event = spare_event();
  std::list<Pending>::iterator place;
  {
    const std::lock_guard lock(mutex_);
    place = pending_.insert(pending_.end(), {nullptr, operation, monotonic_seconds()});
  }
  try {
    event->record();
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    pending_.erase(place);
    throw;
  }
  const std::lock_guard lock(mutex_);
  place->event = std::move(event);
}

std::unique_ptr<DeviceEvent> DeviceWatch::spare_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      std::unique_ptr<DeviceEvent> event = std::move(spare_.back());
      spare_.pop_back();
      return event;
    }
  }
  return device_->make_event();
}

/// Makes the calling thread one that may use the device; none when the device has failed.
std::shared_ptr<void> DeviceWatch::enter() {
  try {
    return device_->enter_thread();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    device_failure_ = cause_of(error);
    return nullptr;
  }
}

void DeviceWatch::ask_device() {
  std::shared_ptr<void> entered;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kPoll, [this] { return stopping_; })) {
    if (!entered) {
      lock.unlock();
      entered = enter();
      lock.lock();
    }
    while (entered && !stopping_ && retire_oldest(lock)) {
    }
    if (device_failure_) return;
  }
}

/// Whether the device has come past the oldest operation, which then no longer is.
bool DeviceWatch::retire_oldest(std::unique_lock<std::mutex>& lock) {
  if (pending_.empty() || !pending_.front().event) return false;
  DeviceEvent& event = *pending_.front().event;
  const double asked = monotonic_seconds();
  bool passed = false;
  std::optional<std::string> failure;
  lock.unlock();
  try {
    passed = event.passed();
  } catch (const std::exception& error) {
    failure = cause_of(error);
  }
  lock.lock();
  if (failure) device_failure_ = failure;
  if (!passed) {
    asked_at_ = asked;
    return false;
  }
  spare_.push_back(std::move(pending_.front().event));
  pending_.pop_front();
  last_done_ = monotonic_seconds();
  return true;
}

void DeviceWatch::keep_deadline() {
  std::optional<Verdict> verdict;
  std::shared_ptr<void> entered;
  {
    std::unique_lock lock(mutex_);
    while (!verdict && !wake_.wait_for(lock, kPoll, [this] { return stopping_; })) {
      if (!entered) {  // what ends the operation uses the device
        lock.unlock();
        entered = enter();
        lock.lock();
      }
      verdict = look(lock);
    }
  }
  if (verdict) expired_(verdict->operation, verdict->elapsed_s, verdict->reason);
}

/// The verdict on the oldest operation when it is late, cannot end or the device has failed; none otherwise.
std::optional<DeviceWatch::Verdict> DeviceWatch::look(std::unique_lock<std::mutex>& lock) {
  if (device_failure_) {
    return Verdict{.operation = pending_.empty() ? Operation{"device", 0, "?"} : pending_.front().operation,
                   .elapsed_s = 0.0,
                   .reason = fmt::format("failed on its device ({})", *device_failure_)};
  }
  if (pending_.empty()) {
    late_looks_ = 0;
    return std::nullopt;
  }
  const double now = monotonic_seconds();
  const double begun = std::max(pending_.front().since, last_done_), deadline = begun + timeout_s_;
  late_looks_ = now >= deadline ? late_looks_ + 1 : 0;
  if (late_looks_ > 0 && (asked_at_ >= deadline || late_looks_ >= kLooksWithoutAnswer))
    return Verdict{pending_.front().operation, now - begun, {}};
  lock.unlock();  // it reads files, and operations shall not wait for that
  const std::string lost = lost_peer_();
  lock.lock();
  if (lost.empty()) {
    peer_lost_at_.reset();
    return std::nullopt;
  }
  if (!peer_lost_at_) peer_lost_at_ = now;
  if (pending_.empty() || now - std::max(*peer_lost_at_, last_done_) < kLastChance_s) return std::nullopt;
  return Verdict{pending_.front().operation, now - begun, fmt::format("lost a peer: {}", lost)};
}

}  // namespace trireme::comm
