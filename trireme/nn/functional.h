#pragma once
// Differentiable operations as plain functions over our own kernels.
//
// Gradients of parameters: backward overwrites memory that was lent for the first one (torch_internals.h) and
// adds in place to a gradient that exists, and returns neither to autograd. It does so only where nobody
// could tell (may_write_gradient()). Where a hook is to see or replace the gradient of a parameter, or where
// torch::autograd::grad() asks for it, the gradient is returned as usual, as that of everything else is.
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "trireme/nn/fp8.h"
#include "trireme/nn/joint.h"

namespace trireme::nn {

/// Which way a weight matrix lies: (out, in) as in torch.nn.Linear, or (in, out) as in GPT-2's Conv1D.
enum class WeightLayout { kOutIn, kInOut };

/// Whether a function's output is read. kUnread: only backward needs the call, so the output has its shape
/// but no values, and the product that would make them is left out.
enum class Output { kRead, kUnread };

/// x (..., in) -> (..., out), plus `residual` (..., out). `bias` and `residual` may be undefined. `fp8`: the
/// products of forward and backward are FP8; x and weights are bf16 then, and in, out and the number of rows
/// of x multiples of kernels::fp8_multiple(). `joints`: of a layer that is cut over ranks (joint.h).
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout = WeightLayout::kOutIn, const at::Tensor& residual = {},
                  const std::optional<Fp8Recipe>& fp8 = {}, Output output = Output::kRead,
                  const Joints& joints = {});

/// x (..., D), weight (V, D) -> (..., V). The gradient of the weight is never deferred
/// (deferred_gradients.h), since that of an embedding may be added to it.
at::Tensor logits(const at::Tensor& x, const at::Tensor& weight);

/// Several (out_i, in) weights on one input: (..., sum of out_i), plus `residual`, which may be undefined.
/// Weights that lie next to each other in memory, as the parameters of a flat unit do, are used as one matrix
/// without a copy.
at::Tensor linear_group(const at::Tensor& x, at::TensorList weights, const std::optional<Fp8Recipe>& fp8 = {},
                        const JointPtr& before = {}, const at::Tensor& residual = {});

/// The output of layers on one input that others read, too, and that input for these: their gradient of it is
/// added to that of `made` without a pass of its own.
struct Tapped {
  at::Tensor made, passed;
};
/// linear_group() of weights without FP8, the input (..., in) passed on; joints as those of linear().
Tapped tapped_linear(const at::Tensor& x, at::TensorList weights, const Joints& joints = {});

/// Layers side by side that read and make features of their own.
struct LinearBlocks {
  at::TensorList weights;      ///< (out_i, r_i) each
  std::vector<int64_t> first;  ///< the first of the out_i features in the output, in rising order
  int64_t width;               ///< of the output; features that no layer makes are zero
};
/// x (..., sum of r_i) -> (..., width), by one product with a matrix that has the weights as its blocks.
at::Tensor linear_blocks(const at::Tensor& x, const LinearBlocks& blocks, const JointPtr& before = {});

// `fp8` of norms and activations: how the linear layers beside them multiply. Where those ask for the largest
// magnitude of what they cast, the kernel that writes it finds it; on a GPU those of LayerNorm and GELU also
// find the gradient of the bias of the layer before (notes.h).

/// x (..., D) / sqrt(mean(x^2) + eps) * weight, over the last dimension: (..., D) in x's dtype; weight (D).
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
/// (x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension: x (..., D) -> (..., D) in x's
/// dtype; weight and bias (D).
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);

/// The residual stream and its norm in one pass each way: {x + delta, norm(x + delta)}. An undefined delta
/// counts as zero; the first result is then x itself, and its gradient joins that of the norm without a pass
/// of its own. x and delta (..., D) -> two tensors (..., D) in their dtype; weight (D).
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta,
                                               const at::Tensor& weight, double eps,
                                               const std::optional<Fp8Recipe>& fp8 = {});
/// As add_rms_norm(), with layer_norm(); bias (D).
std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& delta,
                                                 const at::Tensor& weight, const at::Tensor& bias, double eps,
                                                 const std::optional<Fp8Recipe>& fp8 = {});

/// Rows of weight (rows, width) that indices (...) int64 name -> (..., width). On a GPU the gradient is
/// summed in a fixed order.
at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight);

/// x (..., D) times factors (D) fp32, one for each column: (..., D) in x's dtype. On a GPU one pass each way,
/// and the gradient of factors is summed in a fixed order.
at::Tensor scale_columns(const at::Tensor& x, const at::Tensor& factors);

/// silu(gate) * up of x = gate | up: (..., 2F) -> (..., F).
at::Tensor swiglu(const at::Tensor& x, const std::optional<Fp8Recipe>& fp8 = {});
/// GELU, tanh form, of each element: (...) -> (...) in x's dtype.
at::Tensor gelu(const at::Tensor& x, const std::optional<Fp8Recipe>& fp8 = {});

}  // namespace trireme::nn
