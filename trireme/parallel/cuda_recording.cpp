#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "trireme/base/error.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {
namespace {

template <typename Action>
void ignoring_errors(const Action& action) {
  try {
    action();
  } catch (const std::exception&) {
    // Another failure is on its way to the caller.
  }
}

/// torch's graph, which after a failure leaves the stream, the allocators and the generators in the middle of
/// the capture.
class Graph : public at::cuda::CUDAGraph {
 public:
  void abandon(c10::MempoolId_t pool) {
    end_capture();
    ignoring_errors([&] {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(capture_dev_, pool);
      capture_ended_ = true;  // reset() gives back the pool of a capture that has ended
    });
    ignoring_errors([&] { at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool); });
    for (auto& [state, increment] : captured_generator_states_) state->capturing_ = false;
    ignoring_errors([&] { reset(); });
    ignoring_errors([] { c10::cuda::CUDACachingAllocator::emptyCache(); });
  }

 private:
  void end_capture() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaStream_t stream = capture_stream_.stream();
    cudaGraph_t rest = nullptr;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
      cudaStreamEndCapture(stream, &rest);
    }
    if (rest != nullptr) cudaGraphDestroy(rest);
    cudaGetLastError();  // the next launch shall not report it again
  }
};

class CudaRecording final : public Recording {
 public:
  explicit CudaRecording(c10::MempoolId_t pool) : pool_(pool) {}

  void record(const std::function<void()>& work) override {
    TRIREME_CHECK(!recorded_, "[parallel.recording] this recording was already made");
    // Work that ran before has left memory in the cache, and the recorded work needs as much again in a pool
    // of its own.
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    try {
      // Other threads, such as the loader's, go on as they like; autograd's launch on the same stream.
      graph_.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
      work();
      graph_.capture_end();
    } catch (...) {
      graph_.abandon(pool_);
      throw;
    }
    recorded_ = true;
  }

  void launch() override {
    TRIREME_CHECK(recorded_, "[parallel.recording] nothing has been recorded that could be launched");
    graph_.replay();
  }

 private:
  c10::MempoolId_t pool_;
  Graph graph_;
  bool recorded_ = false;
};

}  // namespace

RecordingMaker recordings() {
  return [pool = at::cuda::graph_pool_handle()] { return std::make_unique<CudaRecording>(pool); };
}

c10::Stream recording_stream(c10::Device device) {
  return c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
}

bool is_recording(c10::Device device) {
  return device.is_cuda() &&
         c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void wait_for_outside(void* event) {
  C10_CUDA_CHECK(cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(), static_cast<cudaEvent_t>(event),
                                     cudaEventWaitExternal));
}

void mark_for_outside(void* event) {
  C10_CUDA_CHECK(cudaEventRecordWithFlags(static_cast<cudaEvent_t>(event), c10::cuda::getCurrentCUDAStream(),
                                          cudaEventRecordExternal));
}

}  // namespace trireme::parallel
