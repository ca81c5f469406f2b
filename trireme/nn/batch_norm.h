#pragma once
// Batch normalisation of channels-last images with what follows it as one function: kernels/batch_norm.h, and
// on a GPU batch_norm.cu.
#include "trireme/kernels/tensor_ops.h"

namespace trireme::nn {

/// y = relu(norm(x) + residual) as `call` says, (B, C, H, W) -> the same, with the batch's own statistics,
/// which running ones take in. weight, bias (C) of the dtype of x. kernels::can_batch_norm(x) holds. Throws
/// LogicError from a backward pass that is to be differentiated itself.
at::Tensor batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const kernels::BatchNormCall& call);

}  // namespace trireme::nn
