#include "trireme/nn/recomputed.h"

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::Tensor as_rows(const at::Tensor& x) {
  return x.reshape({-1, x.size(-1)});
}

/// `rows` with the leading dimensions of `like`.
at::Tensor shaped(const at::Tensor& rows, const at::Tensor& like) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = rows.size(-1);
  return rows.view(shape);
}

/// The output of the norm; fills sum and statistics as the kernels do.
at::Tensor normed(at::Tensor& sum, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& delta,
                  const at::Tensor& weight, const at::Tensor& bias, double eps) {
  at::Tensor y = at::empty_like(x);
  if (bias.defined()) {
    kernels::layer_norm_forward(y, sum, statistics, x, delta, weight, bias, eps);
  } else {
    kernels::rms_norm_forward(y, sum, statistics, x, delta, weight, eps);
  }
  return y;
}

class NormLinearFunction : public Function<NormLinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& delta_in, const at::Tensor& norm_weight,
                               const std::optional<at::Tensor>& norm_bias_in, double eps,
                               at::TensorList weights, const std::optional<at::Tensor>& bias_in,
                               bool in_out) {
    const at::Tensor x = x_in.contiguous();
    const at::Tensor delta = delta_in ? delta_in->contiguous() : at::Tensor();
    const at::Tensor norm_bias = norm_bias_in.value_or(at::Tensor()), bias = bias_in.value_or(at::Tensor());
    const int64_t rows = x.numel() / x.size(-1);
    const auto fp32 = x.options().dtype(at::kFloat);
    at::Tensor statistics = norm_bias.defined() ? at::empty({2, rows}, fp32) : at::empty({rows}, fp32);
    at::Tensor sum = delta.defined() ? at::empty_like(x) : at::Tensor();
    const at::Tensor y = normed(sum, statistics, x, delta, norm_weight, norm_bias, eps);
    const at::Tensor out = shaped(apply_linear({weights, bias, in_out}, as_rows(y)), x);
    if (!delta.defined()) sum = x_in;
    variable_list saved = weights.vec();
    saved.insert(saved.end(), {bias, delta.defined() ? sum : x, norm_weight, norm_bias, statistics});
    context->save_for_backward(std::move(saved));
    context->saved_data["adds"] = delta.defined();
    context->saved_data["eps"] = eps;
    context->saved_data["in_out"] = in_out;
    return {sum, out};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list saved = context->get_saved_variables();
    const variable_list tail(saved.end() - 5, saved.end());
    saved.resize(saved.size() - 5);
    const at::Tensor &bias = tail[0], &x = tail[1], &norm_weight = tail[2], &norm_bias = tail[3];
    at::Tensor statistics = tail[4], no_sum;
    const LinearParams params{saved, bias, context->saved_data["in_out"].toBool()};
    const at::Tensor d_out = as_rows(grads[1]);

    variable_list reported;
    {
      const at::Tensor y =
          normed(no_sum, statistics, x, {}, norm_weight, norm_bias, context->saved_data["eps"].toDouble());
      reported = deferrable_parameter_gradients(params, as_rows(y), d_out);
    }
    const at::Tensor dy = input_gradient(params, d_out);
    const at::Tensor d_sum = grads[0].defined() ? grads[0].contiguous() : at::Tensor();
    at::Tensor dx = at::empty_like(x);
    GradTarget d_weight(norm_weight);
    variable_list result(5);
    if (norm_bias.defined()) {
      GradTarget d_bias(norm_bias);
      kernels::layer_norm_backward(dx, d_weight.tensor(), d_bias.tensor(), dy, d_sum, x, norm_weight,
                                   statistics);
      result[3] = d_bias.reported();
    } else {
      kernels::rms_norm_backward(dx, d_weight.tensor(), dy, d_sum, x, norm_weight, statistics);
    }
    result[0] = dx;
    if (context->saved_data["adds"].toBool()) result[1] = dx;
    result[2] = d_weight.reported();
    result.insert(result.end(), reported.begin(), reported.end());
    result.emplace_back();  // in_out
    return result;
  }
};

at::Tensor activate(const at::Tensor& x, bool gated) {
  std::vector<int64_t> shape = x.sizes().vec();
  if (gated) shape.back() /= 2;
  at::Tensor y = at::empty(shape, x.options());
  gated ? kernels::swiglu_forward(y, x) : kernels::gelu_forward(y, x);
  return y;
}

class ActivatedLinearFunction : public Function<ActivatedLinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, bool gated,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias_in, bool in_out,
                            const std::optional<at::Tensor>& residual) {
    const at::Tensor x = x_in.contiguous(), bias = bias_in.value_or(at::Tensor());
    context->save_for_backward({x, weight, bias});
    context->saved_data["gated"] = gated;
    context->saved_data["in_out"] = in_out;
    context->saved_data["adds"] = residual.has_value();
    return shaped(apply_linear({at::TensorList(weight), bias, in_out}, as_rows(activate(x, gated)),
                               residual.value_or(at::Tensor())),
                  x);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const bool gated = context->saved_data["gated"].toBool();
    const LinearParams params{at::TensorList(weight), bias, context->saved_data["in_out"].toBool()};
    const at::Tensor d_out = as_rows(grads[0]);
    const variable_list reported = deferrable_parameter_gradients(params, as_rows(activate(x, gated)), d_out);
    const at::Tensor dy = input_gradient(params, d_out);
    at::Tensor dx = at::empty_like(x);
    gated ? kernels::swiglu_backward(dx, dy, x) : kernels::gelu_backward(dx, dy, x);
    const at::Tensor d_residual = context->saved_data["adds"].toBool() ? grads[0] : at::Tensor();
    return {dx, at::Tensor(), reported[0], reported[1], at::Tensor(), d_residual};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, at::TensorList weights,
                                                  const at::Tensor& bias, WeightLayout layout) {
  const variable_list results =
      NormLinearFunction::apply(x, optional(delta), norm.weight, optional(norm.bias), norm.eps, weights,
                                optional(bias), layout == WeightLayout::kInOut);
  return {results[0], results[1]};
}

at::Tensor activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                            const at::Tensor& bias, WeightLayout layout, const at::Tensor& residual) {
  return ActivatedLinearFunction::apply(x, activation == Activation::kSwiglu, weight, optional(bias),
                                        layout == WeightLayout::kInOut, optional(residual));
}

}  // namespace trireme::nn
