#include "trireme/nn/functional.h"

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class LinearFunction : public Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const std::optional<at::Tensor>& bias_in, bool in_out,
                            const std::optional<at::Tensor>& residual, bool deferrable) {
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    at::Tensor y = apply_linear({weights, bias, in_out}, rows, residual.value_or(at::Tensor()));
    variable_list saved = weights.vec();
    saved.push_back(bias);
    saved.push_back(rows);
    context->save_for_backward(std::move(saved));
    context->saved_data["in_out"] = in_out;
    context->saved_data["deferrable"] = deferrable;
    context->saved_data["adds"] = residual.has_value();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = y.size(-1);
    return y.view(shape);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    variable_list weights = context->get_saved_variables();
    const at::Tensor rows = weights.back();
    weights.pop_back();
    const at::Tensor bias = weights.back();
    weights.pop_back();
    const LinearParams params{weights, bias, context->saved_data["in_out"].toBool()};
    const at::Tensor dy = grads[0].reshape({rows.size(0), -1});
    variable_list result(1);
    if (context->needs_input_grad(0)) {
      std::vector<int64_t> shape = grads[0].sizes().vec();
      shape.back() = rows.size(1);
      result[0] = input_gradient(params, dy).view(shape);
    }
    const variable_list reported = context->saved_data["deferrable"].toBool()
                                       ? deferrable_parameter_gradients(params, rows, dy)
                                       : add_parameter_gradients(params, rows, dy);
    result.insert(result.end(), reported.begin(), reported.end());
    result.emplace_back();  // in_out
    result.push_back(context->saved_data["adds"].toBool() ? grads[0] : at::Tensor());
    result.emplace_back();  // deferrable
    return result;
  }
};

/// {sum, y} for RMSNorm, which has no bias and keeps only rstd, and LayerNorm.
class AddNormFunction : public Function<AddNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& delta_in, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias_in, double eps) {
    const at::Tensor x = x_in.contiguous();
    const at::Tensor delta = delta_in ? delta_in->contiguous() : at::Tensor();
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const int64_t rows = x.numel() / x.size(-1);
    at::Tensor y = at::empty_like(x);
    at::Tensor sum = delta.defined() ? at::empty_like(x) : at::Tensor();
    const auto fp32 = x.options().dtype(at::kFloat);
    at::Tensor statistics = bias.defined() ? at::empty({2, rows}, fp32) : at::empty({rows}, fp32);
    if (bias.defined()) {
      kernels::layer_norm_forward(y, sum, statistics, x, delta, weight, bias, eps);
    } else {
      kernels::rms_norm_forward(y, sum, statistics, x, delta, weight, eps);
    }
    if (!delta.defined()) sum = x_in;
    context->save_for_backward({delta.defined() ? sum : x, weight, bias, statistics});
    context->saved_data["adds"] = delta.defined();
    return {sum, y};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &statistics = saved[3];
    const at::Tensor d_sum = grads[0].defined() ? grads[0].contiguous() : at::Tensor();
    const at::Tensor dy = grads[1].defined() ? grads[1].contiguous() : at::zeros_like(x);
    at::Tensor dx = at::empty_like(x);
    GradTarget d_weight(weight);
    variable_list result(5);
    if (bias.defined()) {
      GradTarget d_bias(bias);
      kernels::layer_norm_backward(dx, d_weight.tensor(), d_bias.tensor(), dy, d_sum, x, weight, statistics);
      result[3] = d_bias.reported();
    } else {
      kernels::rms_norm_backward(dx, d_weight.tensor(), dy, d_sum, x, weight, statistics);
    }
    result[0] = dx;
    if (context->saved_data["adds"].toBool()) result[1] = dx;
    result[2] = d_weight.reported();
    return result;
  }
};

/// SwiGLU and GELU: one saved input, one kernel each way.
class ActivationFunction : public Function<ActivationFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, bool gated) {
    const at::Tensor x = x_in.contiguous();
    std::vector<int64_t> shape = x.sizes().vec();
    if (gated) shape.back() /= 2;
    at::Tensor y = at::empty(shape, x.options());
    gated ? kernels::swiglu_forward(y, x) : kernels::gelu_forward(y, x);
    context->save_for_backward({x});
    context->saved_data["gated"] = gated;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(x);
    context->saved_data["gated"].toBool() ? kernels::swiglu_backward(dx, dy, x)
                                          : kernels::gelu_backward(dx, dy, x);
    return {dx, at::Tensor()};
  }
};

class EmbeddingFunction : public Function<EmbeddingFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& indices, const at::Tensor& weight) {
    context->save_for_backward({indices, weight});
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &indices = saved[0], &weight = saved[1];
    GradTarget d_weight(weight, AddsTo::kFp32Too);
    kernels::embedding_backward(d_weight.tensor(), grads[0].contiguous(), indices);
    return {at::Tensor(), d_weight.reported()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, WeightLayout layout,
                  const at::Tensor& residual) {
  return LinearFunction::apply(x, at::TensorList(weight), optional(bias), layout == WeightLayout::kInOut,
                               optional(residual), /*deferrable=*/true);
}

at::Tensor logits(const at::Tensor& x, const at::Tensor& weight) {
  const std::optional<at::Tensor> absent;
  return LinearFunction::apply(x, at::TensorList(weight), absent, false, absent, /*deferrable=*/false);
}

at::Tensor linear_group(const at::Tensor& x, at::TensorList weights) {
  const std::optional<at::Tensor> absent;
  return LinearFunction::apply(x, weights, absent, false, absent, /*deferrable=*/true);
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta,
                                               const at::Tensor& weight, double eps) {
  const variable_list results =
      AddNormFunction::apply(x, optional(delta), weight, std::optional<at::Tensor>(), eps);
  return {results[0], results[1]};
}

std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& delta,
                                                 const at::Tensor& weight, const at::Tensor& bias,
                                                 double eps) {
  const variable_list results = AddNormFunction::apply(x, optional(delta), weight, optional(bias), eps);
  return {results[0], results[1]};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return add_rms_norm(x, {}, weight, eps).second;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return add_layer_norm(x, {}, weight, bias, eps).second;
}

at::Tensor swiglu(const at::Tensor& x) {
  return ActivationFunction::apply(x, true);
}

at::Tensor gelu(const at::Tensor& x) {
  return ActivationFunction::apply(x, false);
}

at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight) {
  return weight.is_cuda() ? EmbeddingFunction::apply(indices, weight) : at::embedding(weight, indices);
}

}  // namespace trireme::nn
