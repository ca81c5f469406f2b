#include <algorithm>
#include <cstdint>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;

/// Hashes a word with its index; 0 for a word of zeros.
__device__ unsigned long long mix(uint32_t word, int64_t index) {
  unsigned long long h = word * (2 * static_cast<unsigned long long>(index) + 0x9e3779b97f4a7c15ull);
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ull;
  return h ^ h >> 29;
}

__global__ void checksum_kernel(unsigned long long* sum, const uint16_t* data, int64_t count) {
  unsigned long long mine = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride) {
    mine += mix(data[i], i);
  }
  for (int offset = 16; offset > 0; offset /= 2) mine += __shfl_down_sync(~0u, mine, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, mine);
}

}  // namespace

int add_checksum(uint64_t* sum, const void* data, int64_t bytes, void* stream) {
  const int64_t count = bytes / 2;
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(count / kThreads, 1, kMaxBlocks));
  checksum_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(reinterpret_cast<unsigned long long*>(sum),
                                                              static_cast<const uint16_t*>(data), count);
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
