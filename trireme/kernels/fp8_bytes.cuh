#pragma once
// Helpers of the casts to FP8. Device code only; included by .cu files.
#include <cuda_fp8.h>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {

/// The larger of two magnitudes, given as bits; NaN is above all numbers.
__device__ inline unsigned larger(unsigned a, unsigned b) {
  return a > b ? a : b;
}

__device__ inline float counted(float amax) {
  return amax < kSmallestAmax ? kSmallestAmax : amax;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ unsigned pair_of(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat);
}

template <__nv_fp8_interpretation_t kFormat>
__device__ unsigned word_of(float a, float b, float c, float d) {
  return pair_of<kFormat>(a, b) | pair_of<kFormat>(c, d) << 16;
}

}  // namespace trireme::kernels::cuda
