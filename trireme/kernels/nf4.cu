#include <algorithm>
#include <cstdint>

#include "trireme/base/nf4_format.h"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;
constexpr int kUnroll = 4;     // words of a thread in flight
constexpr int kWordCodes = 8;  // numbers of one word of codes
constexpr int kBlockWords = kNf4Block / kWordCodes;
constexpr int kStride = kNf4Bytes / 4;  // words from one block to the next

struct Nf4Word {
  uint32_t codes;
  float magnitude;

  __device__ void load(const uint32_t* blocks, int64_t word) {
    const uint32_t* block = blocks + word / kBlockWords * kStride;
    codes = __ldcs(block + word % kBlockWords);
    magnitude = __uint_as_float(__ldg(block + kBlockWords));
  }
  /// The first of two numbers has the upper half of their byte, and bytes rise with their address.
  __device__ float value(const float* values, int i) const {
    return values[codes >> (i / 2 * 8 + (i % 2 == 0 ? 4 : 0)) & 15U] * magnitude;
  }
};

template <typename Scalar, int kLanes>
__device__ void store(Scalar* to, const Nf4Word& word, const float* values, int64_t count) {
#pragma unroll
  for (int first = 0; first < kWordCodes; first += kLanes) {
    if (first >= count) return;
    Pack<Scalar, kLanes> pack;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) pack.set(lane, word.value(values, first + lane));
    pack.store(to + first);
  }
}

/// Each thread decodes a word of eight codes at a time. Packs end where numbers do.
template <typename Scalar, int kLanes>
__global__ void decode_kernel(Scalar* out, const uint32_t* blocks, Nf4Values table, int64_t count) {
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = table.of[threadIdx.x];
  __syncthreads();
  const int64_t words = (count + kWordCodes - 1) / kWordCodes;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < words;
       first += kUnroll * stride) {
    Nf4Word in[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (const int64_t i = first + u * stride; i < words) in[u].load(blocks, i);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * stride;
      if (i < words) store<Scalar, kLanes>(out + i * kWordCodes, in[u], values, count - i * kWordCodes);
    }
  }
}

template <typename Scalar, int kLanes>
void launch(Scalar* out, const uint32_t* blocks, const Nf4Values& table, int64_t count, cudaStream_t stream) {
  const int64_t words = (count + kWordCodes - 1) / kWordCodes;
  const int64_t wanted = (words + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const auto grid = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMaxBlocks));
  decode_kernel<Scalar, kLanes><<<grid, kThreads, 0, stream>>>(out, blocks, table, count);
}

}  // namespace

int nf4_decode(void* out, const uint8_t* blocks, const Nf4Values& table, int64_t count, Dtype dtype,
               void* stream) {
  if (count == 0) return cudaSuccess;
  if (reinterpret_cast<uintptr_t>(blocks) % sizeof(uint32_t) != 0) return cudaErrorMisalignedAddress;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kFull = kFullPack<Scalar>;
    const bool full = packs({out}, count * static_cast<int64_t>(sizeof(Scalar)));
    auto* const to = static_cast<Scalar*>(out);
    const auto* const from = reinterpret_cast<const uint32_t*>(blocks);
    full ? launch<Scalar, kFull>(to, from, table, count, as_stream(stream))
         : launch<Scalar, 1>(to, from, table, count, as_stream(stream));
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace trireme::kernels::cuda
