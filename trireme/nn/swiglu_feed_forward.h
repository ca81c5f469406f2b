#pragma once
// The feed-forward half of a Llama block in FP8 as one function of autograd, so that SwiGLU and its gradient
// are computed where they are cast and never are in memory in bf16.
#include <ATen/core/Tensor.h>

#include <optional>

#include "trireme/nn/fp8.h"

namespace trireme::nn {

/// Whether casts can compute what they cast: not where a scale waits for the whole tensor.
bool casts_swiglu(const std::optional<Fp8Recipe>& fp8);

/// x (..., in), weights of gate and up (F, in) each and of down (out, F) -> (..., out), plus `residual`. The
/// bits of linear(swiglu(linear_group(x)), down, residual), whose recipes are `in` and `out`; both have
/// casts_swiglu().
at::Tensor swiglu_feed_forward(const at::Tensor& x, at::TensorList gate_up, const at::Tensor& down,
                               const at::Tensor& residual, const Fp8Recipe& in, const Fp8Recipe& out);

}  // namespace trireme::nn
