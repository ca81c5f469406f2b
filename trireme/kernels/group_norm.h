#pragma once
// Group normalisation (Wu and He 2018) with what follows it, on the CPU: of each image over the positions of
// a group of channels, as channels-last images lie in memory. Scalar is float or c10::BFloat16; statistics
// are fp32. All pointers are to contiguous memory.
#include <cstdint>

namespace trireme::kernels {

struct GroupNormShape {
  int64_t images, positions, channels, groups;  ///< groups divides channels
};

/// y = (x - mean) * rstd * weight + bias, + residual where there is one, then ReLU with `relu`.
template <typename Scalar>
struct GroupNormForward {
  GroupNormShape shape;
  Scalar* y;                    ///< (images, positions, channels)
  float* statistics;            ///< (images, 2, groups): mean and rstd, for backward
  const Scalar *x, *residual;   ///< as y; residual may be nullptr
  const Scalar *weight, *bias;  ///< (channels)
  float eps = 0.0f;
  bool relu = false;
};
template <typename Scalar>
void group_norm_forward(const GroupNormForward<Scalar>& call);

template <typename Scalar>
struct GroupNormBackward {
  GroupNormShape shape;
  Scalar *dx, *d_residual;    ///< (images, positions, channels); d_residual may be nullptr
  Scalar *d_weight, *d_bias;  ///< (channels), added to
  const Scalar *dy, *x, *y;   ///< (images, positions, channels); y is nullptr where no ReLU followed
  const Scalar* weight;       ///< (channels)
  const float* statistics;    ///< of the forward pass
};
template <typename Scalar>
void group_norm_backward(const GroupNormBackward<Scalar>& call);

}  // namespace trireme::kernels
