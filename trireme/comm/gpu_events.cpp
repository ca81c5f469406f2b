#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "trireme/comm/device_watch.h"

namespace trireme::comm {
namespace {

class GpuEvent final : public DeviceEvent {
 public:
  explicit GpuEvent(c10::Device device) : device_(device) {}
  void record() override { event_.record(c10::cuda::getCurrentCUDAStream(device_.index())); }
  bool passed() override { return event_.query(); }

 private:
  c10::Device device_;
  at::cuda::CUDAEvent event_;
};

/// Queries of this thread do not invalidate a capture that another thread has under way.
struct ThreadState {
  explicit ThreadState(c10::Device device) : guard(device) {}
  c10::cuda::CUDAGuard guard;
  c10::cuda::CUDAStreamCaptureModeGuard capture_mode{cudaStreamCaptureModeThreadLocal};
};

class WatchedGpu final : public WatchedDevice {
 public:
  explicit WatchedGpu(c10::Device device) : device_(device) {}
  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<GpuEvent>(device_); }
  bool takes_events() const override {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
  }
  std::shared_ptr<void> enter_thread() override { return std::make_shared<ThreadState>(device_); }

 private:
  c10::Device device_;
};

}  // namespace

std::unique_ptr<WatchedDevice> watched_gpu(c10::Device device) {
  return std::make_unique<WatchedGpu>(device);
}

}  // namespace trireme::comm
