#include "trireme/nn/functional.h"

#include "trireme/kernels/activation.h"
#include "trireme/kernels/norm.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// Matrices (rows_i, columns) that follow each other in one storage, as one matrix; undefined when they do
/// not.
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

/// Adds `left` @ `right` to the gradients of `weights`, which share its rows, and returns what to report for
/// each.
variable_list accumulate_weight_grad(at::TensorList weights, const at::Tensor& left,
                                     const at::Tensor& right) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& weight : weights) {
    if (weight.grad().defined()) grads.push_back(weight.grad());
  }
  if (grads.size() == weights.size()) {
    at::Tensor whole = grads.size() == 1 ? grads.front() : as_one_matrix(grads);
    if (whole.defined()) {
      whole.addmm_(left, right);
      return variable_list(weights.size());
    }
  }
  std::vector<int64_t> rows;
  for (const at::Tensor& weight : weights) rows.push_back(weight.size(0));
  variable_list reported = at::split_with_sizes(at::mm(left, right), rows);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].grad().defined()) continue;
    weights[i].grad().add_(reported[i]);
    reported[i] = at::Tensor();
  }
  return reported;
}

class LinearFunction : public Function<LinearFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const std::optional<at::Tensor>& bias_in, bool in_out) {
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    const at::Tensor weight = joined(weights);
    const at::Tensor right = in_out ? weight : weight.t();
    at::Tensor y = bias.defined() ? at::addmm(bias, rows, right) : at::mm(rows, right);
    variable_list saved = weights.vec();
    saved.push_back(bias);
    saved.push_back(rows);
    context->save_for_backward(std::move(saved));
    context->saved_data["in_out"] = in_out;
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
    const bool in_out = context->saved_data["in_out"].toBool();
    const at::Tensor dy = grads[0].reshape({rows.size(0), -1});

    variable_list result(1);
    if (context->needs_input_grad(0)) {
      const at::Tensor weight = joined(weights);
      std::vector<int64_t> shape = grads[0].sizes().vec();
      shape.back() = rows.size(1);
      result[0] = at::mm(dy, in_out ? weight.t() : weight).view(shape);
    }
    if (weights.front().requires_grad()) {
      const variable_list reported = in_out ? accumulate_weight_grad(weights, rows.t(), dy)
                                            : accumulate_weight_grad(weights, dy.t(), rows);
      result.insert(result.end(), reported.begin(), reported.end());
    } else {
      result.resize(result.size() + weights.size());
    }
    if (bias.defined() && bias.requires_grad()) {
      GradTarget target(bias);
      target.tensor().add_(dy.sum(0));
      result.push_back(target.reported());
    } else {
      result.emplace_back();
    }
    result.emplace_back();  // in_out
    return result;
  }
};

class RmsNormFunction : public Function<RmsNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& weight,
                            double eps) {
    const at::Tensor x = x_in.contiguous();
    const int64_t width = x.size(-1);
    const int64_t rows = x.numel() / width;
    at::Tensor y = at::empty_like(x);
    at::Tensor rstd = at::empty({rows}, x.options().dtype(at::kFloat));
    dispatch_float_or_bf16(x, "rms_norm", [&](auto scalar) {
      using Scalar = decltype(scalar);
      kernels::rms_norm_forward(y.data_ptr<Scalar>(), rstd.data_ptr<float>(), x.data_ptr<Scalar>(),
                                weight.data_ptr<Scalar>(), rows, width, static_cast<float>(eps));
    });
    context->save_for_backward({x, weight, rstd});
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &rstd = saved[2];
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(x);
    GradTarget target(weight);
    dispatch_float_or_bf16(x, "rms_norm", [&](auto scalar) {
      using Scalar = decltype(scalar);
      kernels::rms_norm_backward(dx.data_ptr<Scalar>(), target.tensor().data_ptr<Scalar>(),
                                 dy.data_ptr<Scalar>(), x.data_ptr<Scalar>(), weight.data_ptr<Scalar>(),
                                 rstd.data_ptr<float>(), rstd.numel(), x.size(-1));
    });
    return {dx, target.reported(), at::Tensor()};
  }
};

class LayerNormFunction : public Function<LayerNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& weight,
                            const at::Tensor& bias, double eps) {
    const at::Tensor x = x_in.contiguous();
    const int64_t width = x.size(-1);
    const int64_t rows = x.numel() / width;
    at::Tensor y = at::empty_like(x);
    at::Tensor statistics = at::empty({2, rows}, x.options().dtype(at::kFloat));  // mean, rstd
    dispatch_float_or_bf16(x, "layer_norm", [&](auto scalar) {
      using Scalar = decltype(scalar);
      float* mean = statistics.data_ptr<float>();
      kernels::layer_norm_forward(y.data_ptr<Scalar>(), mean, mean + rows, x.data_ptr<Scalar>(),
                                  weight.data_ptr<Scalar>(), bias.data_ptr<Scalar>(), rows, width,
                                  static_cast<float>(eps));
    });
    context->save_for_backward({x, weight, bias, statistics});
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &statistics = saved[3];
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(x);
    GradTarget weight_target(weight);
    GradTarget bias_target(bias);
    dispatch_float_or_bf16(x, "layer_norm", [&](auto scalar) {
      using Scalar = decltype(scalar);
      const int64_t rows = statistics.size(1);
      const float* mean = statistics.data_ptr<float>();
      kernels::layer_norm_backward(dx.data_ptr<Scalar>(), weight_target.tensor().data_ptr<Scalar>(),
                                   bias_target.tensor().data_ptr<Scalar>(), dy.data_ptr<Scalar>(),
                                   x.data_ptr<Scalar>(), weight.data_ptr<Scalar>(), mean, mean + rows, rows,
                                   x.size(-1));
    });
    return {dx, weight_target.reported(), bias_target.reported(), at::Tensor()};
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
    dispatch_float_or_bf16(x, "activation", [&](auto scalar) {
      using Scalar = decltype(scalar);
      Scalar* out = y.data_ptr<Scalar>();
      const Scalar* in = x.data_ptr<Scalar>();
      if (gated)
        kernels::swiglu_forward(out, in, y.numel() / shape.back(), shape.back());
      else
        kernels::gelu_forward(out, in, x.numel());
    });
    context->save_for_backward({x});
    context->saved_data["gated"] = gated;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor x = context->get_saved_variables()[0];
    const bool gated = context->saved_data["gated"].toBool();
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(x);
    dispatch_float_or_bf16(x, "activation", [&](auto scalar) {
      using Scalar = decltype(scalar);
      Scalar* out = dx.data_ptr<Scalar>();
      const Scalar* grad = dy.data_ptr<Scalar>();
      const Scalar* in = x.data_ptr<Scalar>();
      if (gated)
        kernels::swiglu_backward(out, grad, in, dy.numel() / dy.size(-1), dy.size(-1));
      else
        kernels::gelu_backward(out, grad, in, x.numel());
    });
    return {dx, at::Tensor()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                  WeightLayout layout) {
  return LinearFunction::apply(x, at::TensorList(weight), optional(bias), layout == WeightLayout::kInOut);
}

at::Tensor linear_group(const at::Tensor& x, at::TensorList weights) {
  return LinearFunction::apply(x, weights, std::optional<at::Tensor>(), false);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (x.is_cuda()) return at::rms_norm(x, weight.sizes(), weight, eps);
  return RmsNormFunction::apply(x, weight, eps);
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (x.is_cuda()) return at::layer_norm(x, weight.sizes(), weight, bias, eps);
  return LayerNormFunction::apply(x, weight, bias, eps);
}

at::Tensor swiglu(const at::Tensor& x) {
  if (x.is_cuda()) {
    const std::vector<at::Tensor> halves = x.chunk(2, -1);
    return at::silu(halves[0]) * halves[1];
  }
  return ActivationFunction::apply(x, true);
}

at::Tensor gelu(const at::Tensor& x) {
  if (x.is_cuda()) return at::gelu(x, "tanh");
  return ActivationFunction::apply(x, false);
}

}  // namespace trireme::nn
