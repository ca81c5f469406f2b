#include "trireme/nn/functional.h"

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"
#include "trireme/nn/notes.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class LinearFunction : public Function<LinearFunction> {
 public:
  /// {y}, or {y, x} where x is passed on.
  static variable_list forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                               const std::optional<at::Tensor>& bias_in, bool in_out,
                               const std::optional<at::Tensor>& residual, bool deferrable,
                               const std::optional<Fp8Recipe>& fp8, Output output, KeepInput keep,
                               const Joints& joints, bool passes_on) {
    context->set_materialize_grads(!passes_on);
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const LinearParams params{weights, bias, in_out, fp8, joints};
    LinearKept kept;
    kept.input_amax = noted_amax(x, fp8);
    const at::Tensor y =
        apply_linear(params, as_rows(x), residual.value_or(at::Tensor()), kept, keep, output);
    save(*context, {}, {{params, kept}});
    context->saved_data["deferrable"] = deferrable;
    context->saved_data["adds"] = residual.has_value();
    const at::Tensor out = shaped(y, x);
    if (keep == KeepInput::kYes && is_reached(bias)) ask_for_gradient_sums(out);
    return passes_on ? variable_list{out, x} : variable_list{out};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.linear");
    const RestoredLinear linear = restore(*context).linears.front();
    const LinearParams params = linear.params();
    const at::Tensor passed = grads.size() > 1 ? grads[1] : at::Tensor();
    variable_list result(1);
    if (!grads[0].defined()) {  // nobody uses the product
      result[0] = passed;
      result.resize(1 + params.weights.size() + 1);
    } else if (context->needs_input_grad(0) || is_trained(params)) {
      OutputGradient dy = output_gradient(params, grads[0]);
      ArrivingFactor input = begin_input_factor(params, linear.kept);
      InputGradient dx;
      if (context->needs_input_grad(0))
        dx = begin_input_gradient(params, linear.kept.weight_amax, dy, passed);
      const variable_list reported = gradients_of(*context, params, input.take(), dy.factor());
      if (context->needs_input_grad(0)) result[0] = shaped(dx.take(), grads[0]);
      result.insert(result.end(), reported.begin(), reported.end());
    } else {  // the gradient is of what was added alone
      result.resize(1 + params.weights.size() + 1);
    }
    result.emplace_back();  // in_out
    result.push_back(context->saved_data["adds"].toBool() ? grads[0] : at::Tensor());
    result.resize(result.size() + 6);  // deferrable, fp8, output, keep, joints, passes_on
    return result;
  }

 private:
  static bool is_trained(const LinearParams& params) {
    return std::ranges::any_of(params.weights, is_reached) || is_reached(params.bias);
  }
  static variable_list gradients_of(const AutogradContext& context, const LinearParams& params,
                                    const Factor& input, const Factor& dy) {
    return context.saved_data.at("deferrable").toBool() ? deferrable_parameter_gradients(params, input, dy)
                                                        : add_parameter_gradients(params, input, dy);
  }
};

/// The matrix of all blocks, (width, sum of r_i).
at::Tensor as_one(const LinearBlocks& blocks) {
  int64_t columns = 0, column = 0;
  for (const at::Tensor& weight : blocks.weights) columns += weight.size(1);
  const at::Tensor whole = at::zeros({blocks.width, columns}, blocks.weights.front().options());
  for (size_t i = 0; i < blocks.weights.size(); ++i) {
    const at::Tensor& weight = blocks.weights[i];
    whole.narrow(0, blocks.first[i], weight.size(0)).narrow(1, column, weight.size(1)).copy_(weight);
    column += weight.size(1);
  }
  return whole;
}

class LinearBlocksFunction : public Function<LinearBlocksFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList weights,
                            const std::vector<int64_t>& first, int64_t width, KeepInput keep,
                            const JointPtr& before) {
    const at::Tensor no_bias;
    const LinearParams params{weights, no_bias, false, {}, {.before = before, .after = {}}};
    const at::Tensor whole = as_one({weights, first, width});
    LinearKept of_whole, kept;
    const at::Tensor y = apply_linear({at::TensorList(whole), no_bias, false, {}, params.joints}, as_rows(x),
                                      {}, of_whole, keep);
    kept.input = of_whole.input;
    save(*context, {}, {{params, kept}});
    context->saved_data["first"] = first;
    context->saved_data["width"] = width;
    return shaped(y, x);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.linear_blocks");
    const RestoredLinear linear = restore(*context).linears.front();
    const LinearParams params = linear.params();
    const std::vector<int64_t> first = context->saved_data["first"].toIntVector();
    OutputGradient dy = output_gradient(params, grads[0]);
    ArrivingFactor arriving = begin_input_factor(params, linear.kept);
    variable_list result(1);
    if (context->needs_input_grad(0)) {
      const at::Tensor whole = as_one({linear.weights, first, context->saved_data["width"].toInt()});
      const LinearParams of_whole{at::TensorList(whole), params.bias, false, {}, params.joints};
      result[0] = shaped(input_gradient(of_whole, {}, dy), grads[0]);
    }
    const Factor input = arriving.take();
    int64_t column = 0;
    for (size_t i = 0; i < first.size(); ++i) {
      const at::Tensor& weight = linear.weights[i];
      result.push_back(gradient_of(weight, input, column, dy.rows.narrow(1, first[i], weight.size(0))));
      column += weight.size(1);
    }
    result.resize(result.size() + 4);  // first, width, keep, before
    return result;
  }

 private:
  /// That of one block; undefined where backward has put it in its place, or will.
  static at::Tensor gradient_of(const at::Tensor& weight, const Factor& input, int64_t column,
                                const at::Tensor& dy) {
    const at::Tensor no_bias;
    const Factor rows{input.defined() ? input.rows.narrow(1, column, weight.size(1)) : at::Tensor(), {}};
    return deferrable_parameter_gradients({at::TensorList(weight), no_bias, false}, rows, {dy, {}}).front();
  }
};

/// {sum, y} for RMSNorm, which has no bias and keeps only rstd, and LayerNorm.
class AddNormFunction : public Function<AddNormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& delta_in, const at::Tensor& weight,
                               const std::optional<at::Tensor>& bias_in, double eps, bool asked_for_amax) {
    context->set_materialize_grads(false);  // often nobody uses the sum
    const at::Tensor x = x_in.contiguous();
    const at::Tensor delta = delta_in ? delta_in->contiguous() : at::Tensor();
    const at::Tensor bias = bias_in.value_or(at::Tensor());
    const int64_t rows = x.numel() / x.size(-1);
    at::Tensor y = at::empty_like(x);
    at::Tensor sum = delta.defined() ? at::empty_like(x) : at::Tensor();
    const auto fp32 = x.options().dtype(at::kFloat);
    at::Tensor statistics = bias.defined() ? at::empty({2, rows}, fp32) : at::empty({rows}, fp32);
    const at::Tensor amax = amax_to_raise(y, asked_for_amax);
    const InUse in_use{x, delta, weight, bias};
    if (bias.defined()) {
      kernels::layer_norm_forward(y, sum, statistics, x, delta, weight, bias, eps, amax);
    } else {
      kernels::rms_norm_forward(y, sum, statistics, x, delta, weight, eps, amax);
    }
    note_amax(y, amax);
    if (!delta.defined()) sum = x_in;
    context->save_for_backward({delta.defined() ? sum : x, weight, bias, statistics});
    context->saved_data["adds"] = delta.defined();
    context->saved_data["asked_for_amax"] = asked_for_amax;
    context->saved_data["asked_for_sums"] = asks_for_gradient_sums(delta_in.value_or(x_in));
    return {sum, y};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.add_norm");
    if (!grads[0].defined() && !grads[1].defined()) return variable_list(6);
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &statistics = saved[3];
    const at::Tensor d_sum = grads[0].defined() ? grads[0].contiguous() : at::Tensor();
    const at::Tensor dy = grads[1].defined() ? grads[1].contiguous() : at::zeros_like(x);
    at::Tensor dx = at::empty_like(x);
    const at::Tensor amax = amax_to_raise(dx, context->saved_data["asked_for_amax"].toBool());
    GradTarget d_weight(weight);
    variable_list result(6);
    const InUse in_use{x, weight};
    if (bias.defined()) {
      GradTarget d_bias(bias);
      const at::Tensor sums = sums_to_fill(dx, context->saved_data["asked_for_sums"].toBool());
      kernels::layer_norm_backward(dx, d_weight.tensor(), d_bias.tensor(), dy, d_sum, x, weight, statistics,
                                   amax, sums);
      note_column_sums(dx, sums);
      result[3] = d_bias.reported();
    } else {
      kernels::rms_norm_backward(dx, d_weight.tensor(), dy, d_sum, x, weight, statistics, amax);
    }
    note_amax(dx, amax);
    result[0] = dx;
    if (context->saved_data["adds"].toBool()) result[1] = dx;
    result[2] = d_weight.reported();
    return result;
  }
};

/// SwiGLU and GELU: one saved input, one kernel each way.
class ActivationFunction : public Function<ActivationFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, bool gated,
                            bool asked_for_amax) {
    const at::Tensor x = x_in.contiguous();
    std::vector<int64_t> shape = x.sizes().vec();
    if (gated) shape.back() /= 2;
    at::Tensor y = at::empty(shape, x.options());
    const at::Tensor amax = amax_to_raise(y, asked_for_amax);
    const InUse in_use{x};
    gated ? kernels::swiglu_forward(y, x, amax) : kernels::gelu_forward(y, x, amax);
    note_amax(y, amax);
    context->save_for_backward({x});
    context->saved_data["gated"] = gated;
    context->saved_data["asked_for_amax"] = asked_for_amax;
    context->saved_data["asked_for_sums"] = !gated && asks_for_gradient_sums(x_in);
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph(context->saved_data["gated"].toBool() ? "nn.swiglu" : "nn.gelu");
    const at::Tensor x = context->get_saved_variables()[0];
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx = at::empty_like(x);
    const at::Tensor amax = amax_to_raise(dx, context->saved_data["asked_for_amax"].toBool());
    const at::Tensor sums = sums_to_fill(dx, context->saved_data["asked_for_sums"].toBool());
    const InUse in_use{x};
    context->saved_data["gated"].toBool() ? kernels::swiglu_backward(dx, dy, x, amax)
                                          : kernels::gelu_backward(dx, dy, x, amax, {}, sums);
    note_amax(dx, amax);
    note_column_sums(dx, sums);
    return {dx, at::Tensor(), at::Tensor()};
  }
};

class ScaleColumnsFunction : public Function<ScaleColumnsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_in, const at::Tensor& factors_in) {
    const at::Tensor x = x_in.contiguous(), factors = factors_in.contiguous();
    at::Tensor y = at::empty_like(x);
    const InUse in_use{x, factors};
    kernels::scale_columns(y, x, factors);
    context->save_for_backward({x, factors});
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.scale_columns");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &factors = saved[1];
    at::Tensor dx = at::empty_like(x), d_factors = at::empty_like(factors);
    const InUse in_use{x, factors};
    kernels::scale_columns_backward(dx, d_factors, grads[0].contiguous(), x, factors);
    return {dx, d_factors};
  }
};

class EmbeddingFunction : public Function<EmbeddingFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& indices, const at::Tensor& weight) {
    context->save_for_backward({indices, weight});
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.embedding");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &indices = saved[0], &weight = saved[1];
    GradTarget d_weight(weight, AddsTo::kFp32Too);
    kernels::embedding_backward(d_weight.tensor(), grads[0].contiguous(), indices);
    return {at::Tensor(), d_weight.reported()};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, WeightLayout layout,
                  const at::Tensor& residual, const std::optional<Fp8Recipe>& fp8, Output output,
                  const Joints& joints) {
  return LinearFunction::apply(x, at::TensorList(weight), optional(bias), layout == WeightLayout::kInOut,
                               optional(residual), /*deferrable=*/true, fp8, output,
                               keep_for_backward(weight, bias), joints, /*passes_on=*/false)[0];
}

at::Tensor logits(const at::Tensor& x, const at::Tensor& weight) {
  const std::optional<at::Tensor> absent;
  return LinearFunction::apply(x, at::TensorList(weight), absent, false, absent, /*deferrable=*/false,
                               std::optional<Fp8Recipe>(), Output::kRead, keep_for_backward(), Joints(),
                               /*passes_on=*/false)[0];
}

at::Tensor linear_group(const at::Tensor& x, at::TensorList weights, const std::optional<Fp8Recipe>& fp8,
                        const JointPtr& before, const at::Tensor& residual) {
  const std::optional<at::Tensor> absent;
  return LinearFunction::apply(x, weights, absent, false, optional(residual), /*deferrable=*/true, fp8,
                               Output::kRead, keep_for_backward(weights, {}),
                               Joints{.before = before, .after = {}}, /*passes_on=*/false)[0];
}

Tapped tapped_linear(const at::Tensor& x, at::TensorList weights, const Joints& joints) {
  const std::optional<at::Tensor> absent;
  const bool passes_on = x.requires_grad() && at::GradMode::is_enabled();
  const variable_list results = LinearFunction::apply(x, weights, absent, false, absent, /*deferrable=*/true,
                                                      std::optional<Fp8Recipe>(), Output::kRead,
                                                      keep_for_backward(weights, {}), joints, passes_on);
  if (!passes_on) return {results[0], x};  // an output of a function would require a gradient
  pass_on_amax(results[1], x);
  return {results[0], results[1]};
}

at::Tensor linear_blocks(const at::Tensor& x, const LinearBlocks& blocks, const JointPtr& before) {
  return LinearBlocksFunction::apply(x, blocks.weights, blocks.first, blocks.width,
                                     keep_for_backward(blocks.weights, {}), before);
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& delta,
                                               const at::Tensor& weight, double eps,
                                               const std::optional<Fp8Recipe>& fp8) {
  const variable_list results = AddNormFunction::apply(x, optional(delta), weight,
                                                       std::optional<at::Tensor>(), eps, asks_for_amax(fp8));
  return {results[0], results[1]};
}

std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& delta,
                                                 const at::Tensor& weight, const at::Tensor& bias, double eps,
                                                 const std::optional<Fp8Recipe>& fp8) {
  const variable_list results =
      AddNormFunction::apply(x, optional(delta), weight, optional(bias), eps, asks_for_amax(fp8));
  return {results[0], results[1]};
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return add_rms_norm(x, {}, weight, eps).second;
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return add_layer_norm(x, {}, weight, bias, eps).second;
}

at::Tensor swiglu(const at::Tensor& x, const std::optional<Fp8Recipe>& fp8) {
  return ActivationFunction::apply(x, true, asks_for_amax(fp8));
}

at::Tensor gelu(const at::Tensor& x, const std::optional<Fp8Recipe>& fp8) {
  return ActivationFunction::apply(x, false, asks_for_amax(fp8));
}

at::Tensor scale_columns(const at::Tensor& x, const at::Tensor& factors) {
  return ScaleColumnsFunction::apply(x, factors);
}

at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight) {
  return weight.is_cuda() ? EmbeddingFunction::apply(indices, weight) : at::embedding(weight, indices);
}

}  // namespace trireme::nn
