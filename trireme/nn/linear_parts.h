#pragma once
// What autograd functions with a linear layer in them share: the product and its gradients, with weights that
// lie together in memory used as one.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace trireme::nn {

struct LinearParams {
  at::TensorList weights;  ///< (out_i, in) each, or one (in, out) when in_out
  const at::Tensor& bias;  ///< (out) or undefined
  bool in_out;
};

/// rows (n, in) -> (n, sum of out_i), plus `residual` of any shape with as many elements, unless undefined
at::Tensor apply_linear(const LinearParams& params, const at::Tensor& rows, const at::Tensor& residual = {});
/// dy (n, out) -> (n, in)
at::Tensor input_gradient(const LinearParams& params, const at::Tensor& dy);
/// Writes the gradients of weights and bias into memory lent for them, or adds them to those that are there;
/// returns what to report for each weight and the bias, undefined where it is written or not wanted.
torch::autograd::variable_list add_parameter_gradients(const LinearParams& params, const at::Tensor& rows,
                                                       const at::Tensor& dy);

}  // namespace trireme::nn
