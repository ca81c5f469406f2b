#pragma once
// The product of a linear layer and its gradients, shared by the autograd functions that contain one. Weights
// that are neighbours in memory are multiplied as one matrix.
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
/// Computes the gradients of weights and bias, in lent memory or added to gradients that exist. Returns what
/// backward returns to autograd for each weight and the bias: undefined for gradients that are in place, and
/// for parameters that want none.
torch::autograd::variable_list add_parameter_gradients(const LinearParams& params, const at::Tensor& rows,
                                                       const at::Tensor& dy);
/// The same for the functions of backward: now, or later where DeferredGradients::Scope says so; then nothing
/// is returned for any of them.
torch::autograd::variable_list deferrable_parameter_gradients(const LinearParams& params,
                                                              const at::Tensor& rows, const at::Tensor& dy);

}  // namespace trireme::nn
