#pragma once
// The feed-forward half of a Llama block in FP8 as one function of autograd, so that SwiGLU and its gradient
// are computed inside their casts and are never in memory in bf16.
#include <ATen/core/Tensor.h>

#include <optional>

#include "trireme/nn/fp8.h"
#include "trireme/nn/functional.h"

namespace trireme::nn {

/// Whether casts can compute SwiGLU: not where a scale depends on the whole tensor.
bool casts_swiglu(const std::optional<Fp8Recipe>& fp8);

/// x (..., in), weights of gate and up (F, in) each and of down (out, F) -> (..., out), plus `residual`.
/// Gives the bits of linear(swiglu(linear_group(x)), down, residual) with the recipes `in` and `out`, for
/// both of which casts_swiglu() holds. `joint`: before the first two, and after the last.
at::Tensor swiglu_feed_forward(const at::Tensor& x, at::TensorList gate_up, const at::Tensor& down,
                               const at::Tensor& residual, const Fp8Recipe& in, const Fp8Recipe& out,
                               Output output = Output::kRead, const JointPtr& joint = {});

}  // namespace trireme::nn
