#pragma once
// A CUDA stream that nobody else enqueues on. Only in builds with CUDA.
#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "trireme/base/error.h"

namespace trireme::comm {

/// Of high priority. torch's pool has 32 streams of a priority and hands them out again after that. Two users
/// of one stream wait for each other, which can be for ever where one of them waits for another process.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    int lowest = 0, highest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (error == cudaSuccess) {
      error = cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest);
    }
    TRIREME_CHECK(error == cudaSuccess, "[comm.own_stream] no stream could be made on {}: {}", device.str(),
                  cudaGetErrorString(error));
    index_ = device.index();
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  /// What is enqueued still runs.
  ~OwnStream() { static_cast<void>(cudaStreamDestroy(stream_)); }

  c10::cuda::CUDAStream get() const { return c10::cuda::getStreamFromExternal(stream_, index_); }

 private:
  cudaStream_t stream_ = nullptr;
  c10::DeviceIndex index_ = 0;
};

}  // namespace trireme::comm
