#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "trireme/base/clock.h"
#include "trireme/comm/backend.h"

namespace trireme::comm {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(100);

/// An event behind every operation; a thread looks which is the oldest that has not passed. The clock of an
/// operation starts when it was enqueued or when the one before it was done, whichever is later.
class CudaWatch final : public DeviceWatch {
 public:
  CudaWatch(c10::Device device, double timeout_s, Expired expired)
      : device_(device), timeout_s_(timeout_s), expired_(std::move(expired)), thread_([this] { run(); }) {}

  ~CudaWatch() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void enqueued(const Operation& operation) override {
    // An event inside a graph that is being captured may not be asked for.
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
    const std::lock_guard lock(mutex_);
    pending_.push_back({take_event(), operation, monotonic_seconds()});
    pending_.back().event.record(c10::cuda::getCurrentCUDAStream(device_.index()));
  }

 private:
  struct Pending {
    at::cuda::CUDAEvent event;
    Operation operation;
    double since;
  };

  at::cuda::CUDAEvent take_event() {
    if (spare_.empty()) return {};
    at::cuda::CUDAEvent event = std::move(spare_.back());
    spare_.pop_back();
    return event;
  }

  void run() {
    const c10::cuda::CUDAGuard guard(device_);
    // Queries of this thread must not invalidate a capture that another thread has under way.
    const c10::cuda::CUDAStreamCaptureModeGuard capture_mode(cudaStreamCaptureModeThreadLocal);
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, kPoll, [this] { return stopping_; })) {
      retire_finished();
      if (pending_.empty()) continue;
      const double elapsed = monotonic_seconds() - std::max(pending_.front().since, last_done_);
      if (elapsed < timeout_s_) continue;
      const Operation late = pending_.front().operation;
      lock.unlock();
      expired_(late, elapsed);
      return;
    }
  }

  void retire_finished() {
    while (!pending_.empty() && pending_.front().event.query()) {
      spare_.push_back(std::move(pending_.front().event));
      pending_.pop_front();
      last_done_ = monotonic_seconds();
    }
  }

  c10::Device device_;
  double timeout_s_;
  Expired expired_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Pending> pending_;
  std::vector<at::cuda::CUDAEvent> spare_;
  double last_done_ = 0.0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<DeviceWatch> make_device_watch(c10::Device device, double timeout_s, Expired expired) {
  return std::make_unique<CudaWatch>(device, timeout_s, std::move(expired));
}

}  // namespace trireme::comm
