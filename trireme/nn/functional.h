#pragma once
// Differentiable operations as plain functions over our own kernels.
//
// Gradients of parameters: backward overwrites memory that was lent for the first one (torch_internals.h) and
// adds in place to a gradient that exists. It returns neither to autograd, whose hooks on the parameter run
// all the same. Other gradients are returned as usual.
#include <ATen/core/Tensor.h>

#include <utility>

namespace trireme::nn {

/// Which way a weight matrix lies: (out, in) as in torch.nn.Linear, or (in, out) as in GPT-2's Conv1D.
enum class WeightLayout { kOutIn, kInOut };

/// x (..., in) -> (..., out), plus `residual` (..., out). `bias` and `residual` may be undefined.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout = WeightLayout::kOutIn, const at::Tensor& residual = {});

/// x (..., D), weight (V, D) -> (..., V). The gradient of the weight is never deferred
/// (deferred_gradients.h), since that of an embedding may be added to it.
at::Tensor logits(const at::Tensor& x, const at::Tensor& weight);

/// Several (out_i, in) weights on one input: (..., sum of out_i). Weights that lie next to each other in
/// memory, as the parameters of a flat unit do, are used as one matrix without a copy.
at::Tensor linear_group(const at::Tensor& x, at::TensorList weights);

/// Over the last dimension, which has the size of `weight`.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);

/// The residual stream and its norm in one pass each way: {x + delta, norm(x + delta)}. An undefined delta
/// counts as zero; the first result is then x itself, and its gradient joins that of the norm without a pass
/// of its own.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta,
                                               const at::Tensor& weight, double eps);
std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& delta,
                                                 const at::Tensor& weight, const at::Tensor& bias,
                                                 double eps);

/// Rows of weight (rows, width) that indices (...) int64 name -> (..., width). On a GPU the gradient is
/// summed in a fixed order.
at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight);

/// silu(gate) * up of x = gate | up: (..., 2F) -> (..., F).
at::Tensor swiglu(const at::Tensor& x);
/// GELU, tanh form.
at::Tensor gelu(const at::Tensor& x);

}  // namespace trireme::nn
