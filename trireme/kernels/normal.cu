#include <algorithm>

#include "trireme/kernels/normal.h"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;

__global__ void normal_kernel(float* out, int64_t count, uint64_t key, int64_t first, double deviation) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    const uint64_t bits = mix64(key, static_cast<uint64_t>(first + i));
    out[i] = static_cast<float>(deviation * standard_normal(bits));
  }
}

}  // namespace

int fill_normal(float* out, int64_t count, uint64_t key, int64_t first, double deviation, void* stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks));
  normal_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(out, count, key, first, deviation);
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
