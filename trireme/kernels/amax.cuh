#pragma once
// The largest magnitude that a kernel writes, found on the way: what a cast to FP8 asks for. Device code
// only; included by .cu files.
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {

/// Raises the magnitude at `to` to `bits`, both as bits of fp32, of which NaN is the largest. Most calls find
/// it large enough and write nothing.
__device__ inline void raise(float* to, unsigned bits) {
  if (bits > *reinterpret_cast<volatile unsigned*>(to)) atomicMax(reinterpret_cast<unsigned*>(to), bits);
}

/// The largest magnitude among what a thread has seen, as bits of fp32.
class Amax {
 public:
  __device__ void see(float value) {
    const unsigned bits = __float_as_uint(fabsf(value));
    most_ = bits > most_ ? bits : most_;
  }
  template <typename Scalar, int kLanes>
  __device__ void see(const Pack<Scalar, kLanes>& pack) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) see(pack[lane]);
  }

  /// All threads of a warp come here.
  __device__ void raise_by_warp(float* to) const {
    const unsigned most = __reduce_max_sync(0xffffffffu, most_);
    if (threadIdx.x % 32 == 0) raise(to, most);
  }
  /// All threads of a block of kThreads, one row of them, come here.
  template <int kThreads>
  __device__ void raise_by_block(float* to) const {
    __shared__ unsigned of_warps[kThreads / 32];
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, most_);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const unsigned most =
        __reduce_max_sync(0xffffffffu, threadIdx.x < kThreads / 32 ? of_warps[threadIdx.x] : 0u);
    if (threadIdx.x == 0) raise(to, most);
  }

 private:
  unsigned most_ = 0;
};

}  // namespace trireme::kernels::cuda
