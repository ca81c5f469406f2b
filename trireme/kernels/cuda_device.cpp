#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "trireme/base/error.h"
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"

namespace trireme::kernels {
namespace {

/// Without code every launch would fail, the first of them deep in a step.
void check_code(int64_t index) {
  const int status = cuda::code_for_current_gpu();
  if (status == cudaSuccess) return;
  const GpuInfo gpu = gpus()[static_cast<size_t>(index)];
  if (status != cudaErrorNoKernelImageForDevice && status != cudaErrorUnsupportedPtxVersion) {
    throw EnvironmentError("[kernels.device] GPU {} ({}) cannot be used: {}; check it with nvidia-smi", index,
                           gpu.name, gpu_error_text(status));
  }
  throw EnvironmentError(
      "[kernels.device] GPU {} ({}) has compute capability {}.{}, but this build has kernels for {} only; "
      "build with -DTRIREME_CUDA_ARCHS={}{}, or set device=cpu",
      index, gpu.name, gpu.major, gpu.minor, TRIREME_CUDA_ARCHS, gpu.major, gpu.minor);
}

}  // namespace

std::vector<GpuInfo> gpus() {
  std::vector<GpuInfo> found;
  for (int i = 0; i < c10::cuda::device_count(); ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) break;
    found.push_back({properties.name, properties.major, properties.minor,
                     static_cast<int64_t>(properties.totalGlobalMem)});
  }
  return found;
}

void set_gpu(int64_t index) {
  const int count = c10::cuda::device_count();
  if (index >= count) {
    throw EnvironmentError(
        "[kernels.device] GPU {} was requested, but this process sees {} GPUs; start fewer ranks or check "
        "CUDA_VISIBLE_DEVICES",
        index, count);
  }
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
  check_code(index);
}

void synchronize_gpu() {
  c10::cuda::device_synchronize();
}

int pin(void* data, int64_t bytes) {
  const cudaError_t status = cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable);
  if (status != cudaSuccess) cudaGetLastError();  // or the next launch would report it
  return status;
}

void unpin(void* data) {
  cudaHostUnregister(data);
}

void* current_stream() {
  return c10::cuda::getCurrentCUDAStream().stream();
}

std::string gpu_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

MemoryPeak gpu_memory_peak() {
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return {.allocated = stats.allocated_bytes[kAll].peak,
          .active = stats.active_bytes[kAll].peak,
          .reserved = stats.reserved_bytes[kAll].peak};
}

int64_t gpu_memory_free() {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) != cudaSuccess) {
    cudaGetLastError();  // the next call shall not report it again
    return 0;
  }
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const int64_t unused = stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  return static_cast<int64_t>(free) + unused;
}

std::string nccl_version() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return {};
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace trireme::kernels
