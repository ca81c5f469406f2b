#pragma once
// Batch normalisation (Ioffe and Szegedy 2015) with what follows it, on the CPU: over rows (samples and
// positions) of channels, as channels-last images lie in memory. Scalar is float or c10::BFloat16; statistics
// are fp32. All pointers are to contiguous memory.
#include <cstdint>

namespace trireme::kernels {

/// y = (x - mean) * rstd * weight + bias, + residual where there is one, then ReLU with `relu`.
template <typename Scalar>
struct BatchNormForward {
  Scalar* y;                          ///< (rows, channels)
  float* statistics;                  ///< (2, channels): mean and rstd, for backward
  float *running_mean, *running_var;  ///< (channels), take in the batch's; nullptr: they are left
  const Scalar *x, *residual;         ///< (rows, channels); residual may be nullptr
  const Scalar *weight, *bias;        ///< (channels)
  int64_t rows = 0, channels = 0;     ///< at least 2 rows
  float eps = 0.0f, momentum = 0.0f;
  bool relu = false;
};
template <typename Scalar>
void batch_norm_forward(const BatchNormForward<Scalar>& call);

template <typename Scalar>
struct BatchNormBackward {
  Scalar *dx, *d_residual;    ///< (rows, channels); d_residual may be nullptr
  Scalar *d_weight, *d_bias;  ///< (channels), added to
  const Scalar *dy, *x, *y;   ///< (rows, channels); y is nullptr where no ReLU followed
  const Scalar* weight;       ///< (channels)
  const float* statistics;    ///< of the forward pass
  int64_t rows = 0, channels = 0;
};
template <typename Scalar>
void batch_norm_backward(const BatchNormBackward<Scalar>& call);

}  // namespace trireme::kernels
