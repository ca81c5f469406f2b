#pragma once
// Helpers of all kernels: dtypes, 16-byte packs widened to fp32, sums over warps and blocks in a fixed order.
// Device code only; included by .cu files.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "trireme/kernels/cuda_kernels.h"

namespace trireme::kernels::cuda {

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ inline float to_float(__half value) {
  return __half2float(value);
}

template <typename Scalar>
__device__ Scalar from_float(float value) {
  if constexpr (sizeof(Scalar) == 4) {
    return value;
  } else if constexpr (std::is_same_v<Scalar, __half>) {
    return __float2half_rn(value);
  } else {
    return __float2bfloat16_rn(value);
  }
}

/// e^x for results that are rounded to Scalar: within a few ulp of fp32 for float. For 16-bit types within a
/// few ulp of theirs, in two instructions: the accurate form, and even __expf's care for subnormal numbers,
/// would cost more than the memory traffic.
template <typename Scalar>
__device__ float exponential(float x) {
  if constexpr (sizeof(Scalar) == 4) {
    return expf(x);
  } else {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.4426950408889634f));
    return power;
  }
}

// Integers that stand for elements of any type.
typedef uint64_t Integer64 __attribute__((may_alias));
typedef unsigned __int128 Integer128 __attribute__((may_alias));

/// kLanes elements of Scalar, moved as one access of at most 16 bytes.
template <typename Scalar, int kLanes>
struct alignas(sizeof(Scalar) * kLanes) Pack {
  Scalar lanes[kLanes];

  __device__ void load(const Scalar* from) { *this = *reinterpret_cast<const Pack*>(from); }
  /// Stores the pack as an integer: the compiler may split the assignment of a structure into its members.
  __device__ void store(Scalar* to) const {
    if constexpr (sizeof(Pack) == 16) {
      uint64_t halves[2];
      memcpy(halves, lanes, sizeof(halves));
      *reinterpret_cast<Integer128*>(to) = static_cast<Integer128>(halves[1]) << 64 | halves[0];
    } else if constexpr (sizeof(Pack) == 8) {
      uint64_t word;
      memcpy(&word, lanes, sizeof(word));
      *reinterpret_cast<Integer64*>(to) = word;
    } else {
      *reinterpret_cast<Pack*>(to) = *this;
    }
  }

  __device__ float operator[](int i) const { return to_float(lanes[i]); }
  __device__ void set(int i, float value) { lanes[i] = from_float<Scalar>(value); }
};

/// A Pack as it was loaded. The compiler takes a Pack apart into lanes as soon as it arrives, which waits for
/// it and costs a register per lane; this one only when pack() is called.
template <typename Scalar, int kLanes>
class RawPack {
 public:
  __device__ void load(const Scalar* from) { word_ = *reinterpret_cast<const Word*>(from); }
  /// A streaming load, for data that nobody reads again: it leaves the cache to other data.
  __device__ void load_streaming(const Scalar* from) { word_ = __ldcs(reinterpret_cast<const Word*>(from)); }
  __device__ void assign(const Pack<Scalar, kLanes>& pack) { memcpy(&word_, &pack, sizeof(pack)); }
  __device__ Pack<Scalar, kLanes> pack() const {
    Pack<Scalar, kLanes> lanes;
    memcpy(&lanes, &word_, sizeof(lanes));
    return lanes;
  }

 private:
  static constexpr int kBytes = sizeof(Scalar) * kLanes;
  using Word =
      std::conditional_t<kBytes == 16, int4,
                         std::conditional_t<kBytes == 8, int2, std::conditional_t<kBytes == 4, int, short>>>;
  static_assert(sizeof(Word) == kBytes);
  Word word_;
};

/// Elements of Scalar in 16 bytes.
template <typename Scalar>
constexpr int kFullPack = 16 / static_cast<int>(sizeof(Scalar));

/// Whether all pointers (nullptr counts) and the row length in bytes allow 16-byte accesses.
inline bool packs(std::initializer_list<const void*> pointers, int64_t row_bytes) {
  uintptr_t all = static_cast<uintptr_t>(row_bytes);
  for (const void* pointer : pointers) all |= reinterpret_cast<uintptr_t>(pointer);
  return all % 16 == 0;
}

/// The sum over the threads of a warp, in every thread.
template <typename Value>
__device__ Value warp_sum(Value value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

/// The sum over the threads of a block of kThreads, in every thread. All threads call it; `shared` holds
/// kThreads / 32 values and may be used again right after the next __syncthreads().
template <int kThreads, typename Value>
__device__ Value block_sum(Value value, Value* shared) {
  value = warp_sum(value);
  if constexpr (kThreads == 32) return value;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  Value total = shared[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) total += shared[warp];
  return total;
}

/// Calls body(Scalar{}) for `dtype`.
template <typename Body>
int dispatch(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat:
      return body(float{});
    case Dtype::kBFloat16:
      return body(__nv_bfloat16{});
    case Dtype::kHalf:
      return body(__half{});
  }
  return cudaErrorInvalidValue;
}

/// Calls body(Scalar{}, Sum{}) for `dtype` and the dtype of what is added to: the same, or fp32.
template <typename Body>
int dispatch_sum(Dtype dtype, Dtype sum, const Body& body) {
  if (sum != dtype && sum != Dtype::kFloat) return cudaErrorInvalidValue;
  return dispatch(dtype, [&](auto scalar) {
    return sum == Dtype::kFloat ? body(scalar, float{}) : body(scalar, scalar);
  });
}

inline cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace trireme::kernels::cuda
