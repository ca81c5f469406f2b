#pragma once
// Group normalisation of channels-last images on a CPU with what follows it as one function:
// kernels/group_norm.h.
#include "trireme/kernels/tensor_ops.h"

namespace trireme::nn {

/// y = relu(norm(x) + residual) as `call` says, (B, C, H, W) -> the same. weight, bias (C) of the dtype of x.
/// kernels::can_group_norm(x) holds. Throws LogicError from a backward pass that is to be differentiated
/// itself.
at::Tensor group_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const kernels::GroupNormCall& call);

}  // namespace trireme::nn
