#include "trireme/nn/linear_parts.h"

#include <algorithm>

#include "trireme/kernels/matmul.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {

using torch::autograd::variable_list;

namespace {

/// One matrix over `parts` (rows_i, columns), if they follow each other in one storage; else undefined.
at::Tensor as_one_matrix(at::TensorList parts) {
  const at::Tensor& first = parts.front();
  int64_t rows = 0;
  for (const at::Tensor& part : parts) {
    const bool follows = part.is_contiguous() && part.is_alias_of(first) &&
                         part.storage_offset() == first.storage_offset() + rows * first.size(1);
    if (!follows) return {};
    rows += part.size(0);
  }
  return first.as_strided({rows, first.size(1)}, {first.size(1), 1});
}

at::Tensor joined(at::TensorList parts) {
  if (parts.size() == 1) return parts.front();
  const at::Tensor whole = as_one_matrix(parts);
  return whole.defined() ? whole : at::cat(parts);
}

/// `left` @ `right` holds the gradients of `weights`, one after another by rows. Returns those that are not
/// in place afterwards, for backward to return.
variable_list accumulate_weight_grad(at::TensorList weights, const at::Tensor& left,
                                     const at::Tensor& right) {
  const bool first = std::ranges::all_of(weights, can_claim_gradient);
  std::vector<at::Tensor> grads;
  for (const at::Tensor& weight : weights) {
    grads.push_back(first ? claim_gradient(weight) : gradient_to_add_to(weight));
  }
  if (std::ranges::all_of(grads, [](const at::Tensor& grad) { return grad.defined(); })) {
    at::Tensor whole = grads.size() == 1 ? grads.front() : as_one_matrix(grads);
    if (whole.defined() && whole.is_contiguous()) {
      kernels::matmul(whole, left, right, {}, first ? at::Tensor() : whole);
      return variable_list(weights.size());
    }
  }
  std::vector<int64_t> rows;
  for (const at::Tensor& weight : weights) rows.push_back(weight.size(0));
  variable_list reported = at::split_with_sizes(kernels::product(left, right), rows);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!grads[i].defined()) continue;
    first ? grads[i].copy_(reported[i]) : grads[i].add_(reported[i]);
    reported[i] = at::Tensor();
  }
  return reported;
}

}  // namespace

at::Tensor apply_linear(const LinearParams& params, const at::Tensor& rows, const at::Tensor& residual) {
  const at::Tensor weight = joined(params.weights);
  const at::Tensor right = params.in_out ? weight : weight.t();
  const at::Tensor addend =
      residual.defined() ? residual.reshape({rows.size(0), right.size(1)}).contiguous() : at::Tensor();
  return kernels::product(rows, right, params.bias, addend);
}

at::Tensor input_gradient(const LinearParams& params, const at::Tensor& dy) {
  const at::Tensor weight = joined(params.weights);
  return kernels::product(dy, params.in_out ? weight.t() : weight);
}

variable_list add_parameter_gradients(const LinearParams& params, const at::Tensor& rows,
                                      const at::Tensor& dy) {
  variable_list reported(params.weights.size());
  if (std::ranges::any_of(params.weights, [](const at::Tensor& weight) { return weight.requires_grad(); })) {
    reported = params.in_out ? accumulate_weight_grad(params.weights, rows.t(), dy)
                             : accumulate_weight_grad(params.weights, dy.t(), rows);
  }
  if (params.bias.defined() && params.bias.requires_grad()) {
    GradTarget target(params.bias);
    kernels::add_column_sums(target.tensor(), dy.contiguous());
    reported.push_back(target.reported());
  } else {
    reported.emplace_back();
  }
  return reported;
}

}  // namespace trireme::nn
