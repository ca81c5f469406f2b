#pragma once
// Deadlines for operations that a GPU finishes long after the host has moved on, and an early end for those
// that wait for a lost peer or that the GPU failed in. Internal to this room.
#include <c10/core/Device.h>

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "trireme/comm/operation.h"

namespace trireme::comm {

/// A place in the work that was enqueued on a device.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Moves behind everything on the current stream. Blocks while the device takes no more work, for ever when
  /// it hangs.
  virtual void record() = 0;
  /// Whether the device has come past it. Throws when the device has failed. May block while record() does.
  virtual bool passed() = 0;
};

/// What the watch needs of a device; a test brings its own.
class WatchedDevice {
 public:
  virtual ~WatchedDevice() = default;
  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  /// Whether the current stream takes events now: not while a graph is captured.
  virtual bool takes_events() const = 0;
  /// Makes this thread one that may query events; the watch keeps the result until the thread ends.
  virtual std::shared_ptr<void> enter_thread() = 0;
};

/// Throws LogicError in a build without CUDA.
std::unique_ptr<WatchedDevice> watched_gpu(c10::Device device);

/// Two threads: one asks the device how far it has come, which blocks when a hung operation has filled the
/// device's queue. The other keeps the deadline and asks after peers by what the host knows.
class DeviceWatch {
 public:
  /// Why the device would wait in vain, in words; empty while nothing is known. Does not throw.
  using LostPeer = std::function<std::string()>;
  /// Called from the thread that keeps the deadline, at most once: `operation` has run for `elapsed_s` and
  /// will not end, because of `reason`; an empty reason means the deadline. Does not throw.
  using Expired =
      std::function<void(const Operation& operation, double elapsed_s, const std::string& reason)>;

  DeviceWatch(std::unique_ptr<WatchedDevice> device, double timeout_s, LostPeer lost_peer, Expired expired);
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;
  ~DeviceWatch();

  /// `operation` was enqueued on the current stream. Its clock starts now, or when the operation before it is
  /// done, whichever is later. Blocks as DeviceEvent::record(); the deadline is kept meanwhile.
  void enqueued(const Operation& operation);

 private:
  struct Pending {
    std::unique_ptr<DeviceEvent> event;  ///< none while it is recorded
    Operation operation;
    double since;
  };
  struct Verdict {
    Operation operation;
    double elapsed_s;
    std::string reason;
  };

  std::unique_ptr<DeviceEvent> spare_event();
  void keep_deadline();
  void ask_device();
  bool retire_oldest(std::unique_lock<std::mutex>& lock);
  std::shared_ptr<void> enter();
  std::optional<Verdict> look(std::unique_lock<std::mutex>& lock);

  std::unique_ptr<WatchedDevice> device_;
  double timeout_s_;
  LostPeer lost_peer_;
  Expired expired_;
  std::mutex mutex_;  ///< nobody calls the device while holding it
  std::condition_variable wake_;
  std::list<Pending> pending_;  ///< oldest first; only ask_device() removes one that has its event
  std::vector<std::unique_ptr<DeviceEvent>> spare_;
  std::optional<std::string> device_failure_;
  double last_done_ = 0.0;
  double asked_at_ = 0.0;   ///< when the device was last asked and said that the oldest is not done
  int64_t late_looks_ = 0;  ///< in a row
  std::optional<double> peer_lost_at_;
  bool stopping_ = false;
  std::thread asks_device_, keeps_deadline_;
};

}  // namespace trireme::comm
