#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "trireme/kernels/pull.h"

namespace trireme::kernels {
namespace {

constexpr int kThreads = 512;
// Enough to saturate the links, measured on H200s; more would only take multiprocessors from others. A single
// peer answers more slowly than three.
constexpr int kSumBlocks = 16, kSumBlocksOfTwo = 32;
constexpr int kGatherBlocks = 32;
constexpr int kLoads = 8;  // 16-byte loads of a thread from other ranks in flight, about
constexpr int kPollsBetweenLooks = 1024;
static_assert(kSumBlocksOfTwo <= kPullBlocks && kGatherBlocks <= kPullBlocks);

__device__ void post(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ uint64_t look(const uint64_t* at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}

/// Rounds wrap around.
__device__ bool has_reached(uint32_t round, uint32_t wanted) {
  return static_cast<int32_t>(round - wanted) >= 0;
}

/// Whether the value at `at` has come to `round` in the bits from `shift`; false when the host wants no more
/// waiting, or ranks were found in different operations.
__device__ bool await(const uint64_t* at, int shift, const PullCall& call, uint64_t& value) {
  for (int polls = 1;; ++polls) {
    value = look(at);
    if (has_reached(static_cast<uint32_t>(value >> shift), call.round)) return true;
    if (polls % kPollsBetweenLooks != 0) continue;
    const auto* const state = static_cast<const volatile PullState*>(call.state);
    if (state->stop != 0 || state->odd_rank != 0) return false;
  }
}

__device__ void report_odd(const PullCall& call, int rank) {
  auto* const state = static_cast<volatile PullState*>(call.state);
  state->odd_round = call.round;
  state->odd_channel = static_cast<uint32_t>(call.channel);
  __threadfence_system();
  state->odd_rank = static_cast<uint32_t>(rank) + 1;
}

/// All threads call it. Whether every peer has its input ready for the same operation.
__device__ bool begin(const PullCall& call) {
  bool agreed = true;
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < call.size && peer != call.rank) {
    const uint64_t mine = static_cast<uint64_t>(call.round) << 32 | call.operation;
    post(&call.boxes[peer]->ready[call.channel][blockIdx.x][call.rank], mine);
    uint64_t theirs = 0;
    agreed = await(&call.boxes[call.rank]->ready[call.channel][blockIdx.x][peer], 32, call, theirs);
    if (agreed && theirs != mine) {
      report_odd(call, peer);
      agreed = false;
    }
  }
  return __syncthreads_and(agreed);
}

/// All threads call it. Returns when every peer has read what it wants of this rank.
__device__ void end(const PullCall& call) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= call.size || peer == call.rank) return;
  post(&call.boxes[peer]->done[call.channel][blockIdx.x][call.rank], call.round);
  uint64_t theirs = 0;
  await(&call.boxes[call.rank]->done[call.channel][blockIdx.x][peer], 0, call, theirs);
}

/// Loads that go past this GPU's L1 cache, which does not see what peers write.
__device__ uint4 load(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ uint32_t load(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ uint16_t load(const uint16_t* from) {
  uint16_t v;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
__device__ uint8_t load(const uint8_t* from) {
  return *static_cast<const volatile uint8_t*>(from);
}

/// How a Word holds kLanes elements that are widened to fp32.
template <bool kBf16, typename Word>
struct Lanes;
template <>
struct Lanes<false, uint4> {
  static constexpr int kCount = 4;
  static __device__ float get(const uint4& word, int i) { return __uint_as_float((&word.x)[i]); }
};
template <>
struct Lanes<true, uint4> {
  static constexpr int kCount = 8;
  static __device__ float get(const uint4& word, int i) {
    const uint32_t pair = (&word.x)[i / 2];
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};
template <>
struct Lanes<false, uint32_t> {
  static constexpr int kCount = 1;
  static __device__ float get(uint32_t word, int) { return __uint_as_float(word); }
};
template <>
struct Lanes<true, uint16_t> {
  static constexpr int kCount = 1;
  static __device__ float get(uint16_t word, int) {
    return __uint_as_float(static_cast<uint32_t>(word) << 16);
  }
};

__host__ __device__ constexpr int power_below(int count) {
  int power = 1;
  while (2 * power < count) power *= 2;
  return power;
}

/// The order of additions of tree_sum.h, in registers.
template <int kFirst, int kCount, typename Get>
__device__ float tree(const Get& get) {
  if constexpr (kCount == 1) {
    return get(kFirst);
  } else {
    constexpr int kLeft = power_below(kCount);
    return tree<kFirst, kLeft>(get) + tree<kFirst + kLeft, kCount - kLeft>(get);
  }
}

/// Packs that a thread takes at once from each rank, so that enough loads from the other ranks are in flight.
__host__ __device__ constexpr int unroll(int ranks) {
  return ranks == 2 ? kLoads / 2 : kLoads / (ranks - 1) > 1 ? kLoads / (ranks - 1) : 1;
}

template <int kRanks, bool kBf16, typename Word>
__global__ void __launch_bounds__(kThreads) sum_kernel(float* output, int64_t words, const PullCall call) {
  using Lane = Lanes<kBf16, Word>;
  constexpr int kUnroll = unroll(kRanks);
  if (!begin(call)) return;
  const Word* rows[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) rows[r] = static_cast<const Word*>(call.inputs[r]) + call.rank * words;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += kUnroll * stride) {
    Word loaded[kUnroll][kRanks];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (i + u * stride < words) loaded[u][r] = load(rows[r] + i + u * stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u * stride >= words) break;
      float sums[Lane::kCount];
#pragma unroll
      for (int e = 0; e < Lane::kCount; ++e) {
        sums[e] = tree<0, kRanks>([&](int r) { return Lane::get(loaded[u][r], e); });
      }
      float* const to = output + (i + u * stride) * Lane::kCount;
      if constexpr (Lane::kCount == 1) {
        *to = sums[0];
      } else {
#pragma unroll
        for (int e = 0; e < Lane::kCount; e += 4) {
          *reinterpret_cast<float4*>(to + e) = make_float4(sums[e], sums[e + 1], sums[e + 2], sums[e + 3]);
        }
      }
    }
  }
  end(call);
}

template <int kRanks, typename Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(Word* output, int64_t words, const PullCall call) {
  constexpr int kUnroll = unroll(kRanks);
  if (!begin(call)) return;
  // Rank r reads from rank r first, then r + 1, ..., so that ranks do not all read from one peer at once.
  const Word* from[kRanks];
  Word* to[kRanks];
#pragma unroll
  for (int k = 0; k < kRanks; ++k) {
    const int peer = (call.rank + k) % kRanks;
    from[k] = static_cast<const Word*>(call.inputs[peer]);
    to[k] = output + peer * words;
  }
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += kUnroll * stride) {
    Word loaded[kUnroll][kRanks];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < kRanks; ++k) {
        if (i + u * stride < words) loaded[u][k] = load(from[k] + i + u * stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int k = 0; k < kRanks; ++k) {
        if (i + u * stride < words) to[k][i + u * stride] = loaded[u][k];
      }
    }
  }
  end(call);
}

__global__ void begin_kernel(const PullCall call) {
  begin(call);
}
__global__ void end_kernel(const PullCall call) {
  end(call);
}

bool aligned(const PullCall& call, const void* output, int64_t part_bytes) {
  uintptr_t all = reinterpret_cast<uintptr_t>(output) | static_cast<uintptr_t>(part_bytes);
  for (int r = 0; r < call.size; ++r) all |= reinterpret_cast<uintptr_t>(call.inputs[r]);
  return all % sizeof(uint4) == 0;
}

/// A function of values that are equal on all ranks, since block b of a rank waits for block b of its peers.
unsigned blocks_for(int64_t part_bytes, int most) {
  constexpr int64_t kBlockBytes = kThreads * sizeof(uint4);
  return static_cast<unsigned>(std::clamp<int64_t>((part_bytes + kBlockBytes - 1) / kBlockBytes, 1, most));
}

/// Calls body(std::integral_constant<int, size>) for sizes 2 to kPullRanks.
template <int kRanks = 2, typename Body>
int for_size(int size, const Body& body) {
  if constexpr (kRanks > kPullRanks) {
    return cudaErrorInvalidValue;
  } else {
    if (size != kRanks) return for_size<kRanks + 1>(size, body);
    body(std::integral_constant<int, kRanks>{});
    return cudaGetLastError();
  }
}

template <bool kBf16, typename Word>
int launch_sum(float* output, int64_t count, const PullCall& call, cudaStream_t stream) {
  const int64_t words = count / Lanes<kBf16, Word>::kCount;
  const int most = call.size == 2 ? kSumBlocksOfTwo : kSumBlocks;
  return for_size(call.size, [&](auto ranks) {
    sum_kernel<ranks(), kBf16, Word>
        <<<blocks_for(count * (kBf16 ? 2 : 4), most), kThreads, 0, stream>>>(output, words, call);
  });
}

template <typename Word>
int launch_gather(void* output, int64_t bytes, const PullCall& call, cudaStream_t stream) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  return for_size(call.size, [&](auto ranks) {
    gather_kernel<ranks(), Word>
        <<<blocks_for(bytes, kGatherBlocks), kThreads, 0, stream>>>(static_cast<Word*>(output), words, call);
  });
}

}  // namespace

int pull_sum(float* output, int64_t count, bool bf16, const PullCall& call, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool packed = aligned(call, output, count * (bf16 ? 2 : 4));
  if (bf16) {
    return packed ? launch_sum<true, uint4>(output, count, call, stream)
                  : launch_sum<true, uint16_t>(output, count, call, stream);
  }
  return packed ? launch_sum<false, uint4>(output, count, call, stream)
                : launch_sum<false, uint32_t>(output, count, call, stream);
}

int pull_gather(void* output, int64_t bytes, const PullCall& call, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return aligned(call, output, bytes) ? launch_gather<uint4>(output, bytes, call, stream)
                                      : launch_gather<uint8_t>(output, bytes, call, stream);
}

int pull_begin(const PullCall& call, void* stream) {
  begin_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}

int pull_end(const PullCall& call, void* stream) {
  end_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}

}  // namespace trireme::kernels
