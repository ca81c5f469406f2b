#pragma once
// RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016) over rows, on the CPU. Scalar is float or
// c10::BFloat16; statistics are fp32. All pointers are to contiguous memory.
#include <cstdint>

namespace trireme::kernels {

/// y (rows, width) = x * rstd * weight; rstd (rows) is kept for backward.
template <typename Scalar>
void rms_norm_forward(Scalar* y, float* rstd, const Scalar* x, const Scalar* weight, int64_t rows,
                      int64_t width, float eps);

/// dx (rows, width) is written; dweight (width) is added to.
template <typename Scalar>
void rms_norm_backward(Scalar* dx, Scalar* dweight, const Scalar* dy, const Scalar* x, const Scalar* weight,
                       const float* rstd, int64_t rows, int64_t width);

/// y = (x - mean) * rstd * weight + bias; mean and rstd (rows) are kept for backward.
template <typename Scalar>
void layer_norm_forward(Scalar* y, float* mean, float* rstd, const Scalar* x, const Scalar* weight,
                        const Scalar* bias, int64_t rows, int64_t width, float eps);

/// dx is written; dweight and dbias (width) are added to.
template <typename Scalar>
void layer_norm_backward(Scalar* dx, Scalar* dweight, Scalar* dbias, const Scalar* dy, const Scalar* x,
                         const Scalar* weight, const float* mean, const float* rstd, int64_t rows,
                         int64_t width);

}  // namespace trireme::kernels
