#include "trireme/nn/recomputed.h"

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"
#include "trireme/nn/notes.h"
#include "trireme/nn/swiglu_feed_forward.h"

namespace trireme::nn {
namespace {

using kernels::Fp8Source;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// The output of the norm, with its largest magnitude noted if it is asked for; fills sum and statistics as
/// the kernels do.
at::Tensor normed(at::Tensor& sum, at::Tensor& statistics, const at::Tensor& x, const at::Tensor& delta,
                  const at::Tensor& weight, const at::Tensor& bias, double eps, bool asked) {
  at::Tensor y = at::empty_like(x);
  const at::Tensor amax = amax_to_raise(y, asked);
  const InUse in_use{x, delta, weight, bias};
  if (bias.defined()) {
    kernels::layer_norm_forward(y, sum, statistics, x, delta, weight, bias, eps, amax);
  } else {
    kernels::rms_norm_forward(y, sum, statistics, x, delta, weight, eps, amax);
  }
  note_amax(y, amax);
  return y;
}

class NormLinearFunction : public Function<NormLinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in,
                               const std::optional<at::Tensor>& delta_in, const at::Tensor& norm_weight,
                               const std::optional<at::Tensor>& norm_bias_in, double eps,
                               at::TensorList weights, const std::optional<at::Tensor>& bias_in, bool in_out,
                               const std::optional<Fp8Recipe>& fp8, const JointPtr& before,
                               bool asked_for_amax, bool passes_on) {
    context->set_materialize_grads(false);  // often nobody uses the sum
    const at::Tensor x = x_in.contiguous();
    const at::Tensor delta = delta_in ? delta_in->contiguous() : at::Tensor();
    const at::Tensor norm_bias = norm_bias_in.value_or(at::Tensor()), bias = bias_in.value_or(at::Tensor());
    const int64_t rows = x.numel() / x.size(-1);
    const auto fp32 = x.options().dtype(at::kFloat);
    at::Tensor statistics = norm_bias.defined() ? at::empty({2, rows}, fp32) : at::empty({rows}, fp32);
    at::Tensor sum = delta.defined() ? at::empty_like(x) : at::Tensor();
    const at::Tensor y = normed(sum, statistics, x, delta, norm_weight, norm_bias, eps, asked_for_amax);
    const LinearParams params{weights, bias, in_out, fp8, {.before = before, .after = {}}};
    LinearKept kept;
    kept.input_amax = noted_amax(y, fp8);
    const at::Tensor out = shaped(apply_linear(params, as_rows(y), {}, kept, KeepInput::kNo), x);
    if (is_reached(bias)) ask_for_gradient_sums(out);
    if (!delta.defined()) sum = x_in;
    save(*context, {delta.defined() ? sum : x, norm_weight, norm_bias, statistics}, {{params, kept}});
    context->saved_data["adds"] = delta.defined();
    context->saved_data["eps"] = eps;
    context->saved_data["asked_for_sums"] = asks_for_gradient_sums(delta_in.value_or(x_in));
    context->saved_data["asked_for_amax"] = asked_for_amax;
    return passes_on ? variable_list{sum, out, y} : variable_list{sum, out};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.add_norm_linear");
    const Restored restored = restore(*context);
    const at::Tensor passed = grads.size() > 2 ? grads[2] : at::Tensor();
    if (!grads[1].defined() && !passed.defined()) return of_sum_alone(*context, restored, grads[0]);
    const at::Tensor &x = restored.saved[0], &norm_weight = restored.saved[1], &norm_bias = restored.saved[2];
    at::Tensor statistics = restored.saved[3], no_sum;
    const RestoredLinear& linear = restored.linears.front();
    const LinearParams params = linear.params();
    variable_list reported(linear.weights.size() + 1);
    at::Tensor dy = passed.defined() ? passed.contiguous() : at::Tensor();
    if (grads[1].defined()) {
      OutputGradient d_out = output_gradient(params, grads[1]);
      ArrivingFactor input =
          begin_input_factor(params,
                             as_rows(normed(no_sum, statistics, x, {}, norm_weight, norm_bias,
                                            context->saved_data["eps"].toDouble(), /*asked=*/false)),
                             linear.kept.input_amax);
      InputGradient d_input = begin_input_gradient(params, linear.kept.weight_amax, d_out, passed);
      reported = deferrable_parameter_gradients(params, input.take(), d_out.factor());
      dy = d_input.take();
    }
    const at::Tensor d_sum = grads[0].defined() ? grads[0].contiguous() : at::Tensor();
    at::Tensor dx = at::empty_like(x);
    const at::Tensor amax = amax_to_raise(dx, context->saved_data["asked_for_amax"].toBool());
    GradTarget d_weight(norm_weight);
    variable_list result(5);
    const InUse in_use{x, norm_weight};
    if (norm_bias.defined()) {
      GradTarget d_bias(norm_bias);
      const at::Tensor sums = sums_to_fill(dx, context->saved_data["asked_for_sums"].toBool());
      kernels::layer_norm_backward(dx, d_weight.tensor(), d_bias.tensor(), dy, d_sum, x, norm_weight,
                                   statistics, amax, sums);
      note_column_sums(dx, sums);
      result[3] = d_bias.reported();
    } else {
      kernels::rms_norm_backward(dx, d_weight.tensor(), dy, d_sum, x, norm_weight, statistics, amax);
    }
    note_amax(dx, amax);
    result[0] = dx;
    if (context->saved_data["adds"].toBool()) result[1] = dx;
    result[2] = d_weight.reported();
    result.insert(result.end(), reported.begin(), reported.end());
    result.resize(result.size() + 5);  // in_out, fp8, before, asked_for_amax, passes_on
    return result;
  }

 private:
  /// The gradients that backward returns where nobody uses the product.
  static variable_list of_sum_alone(AutogradContext& context, const Restored& restored,
                                    const at::Tensor& d_sum) {
    variable_list result(11 + restored.linears.front().weights.size());
    result[0] = d_sum;
    if (context.saved_data["adds"].toBool()) result[1] = d_sum;
    return result;
  }
};

/// Rows of the activation of x, with their largest magnitude noted if it is asked for; where casts can
/// compute them, they are left to these.
Fp8Source activate(const at::Tensor& x, bool gated, const std::optional<Fp8Recipe>& fp8, bool asked) {
  if (gated && casts_swiglu(fp8)) return Fp8Source::swiglu(as_rows(x));
  std::vector<int64_t> shape = as_rows(x).sizes().vec();
  if (gated) shape.back() /= 2;
  at::Tensor y = at::empty(shape, x.options());
  const at::Tensor amax = amax_to_raise(y, asked);
  const InUse in_use{x};
  gated ? kernels::swiglu_forward(y, x, amax) : kernels::gelu_forward(y, x, amax);
  note_amax(y, amax);
  return y;
}

class ActivatedLinearFunction : public Function<ActivatedLinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x_in, bool gated,
                               const at::Tensor& weight, const std::optional<at::Tensor>& bias_in,
                               bool in_out, const std::optional<at::Tensor>& residual,
                               const std::optional<Fp8Recipe>& fp8, const JointPtr& after,
                               bool asked_for_amax, bool passes_on) {
    context->set_materialize_grads(!passes_on);
    const at::Tensor x = x_in.contiguous(), bias = bias_in.value_or(at::Tensor());
    const LinearParams params{at::TensorList(weight), bias, in_out, fp8, {.before = {}, .after = after}};
    LinearKept kept;
    at::Tensor y, read;
    {
      const Fp8Source activated = activate(x, gated, fp8, asked_for_amax);
      kept.input_amax = noted_amax(activated.x(), fp8);
      y = apply_linear(params, activated, residual.value_or(at::Tensor()), kept, KeepInput::kNo);
      if (passes_on) read = activated.x();
    }
    save(*context, {x}, {{params, kept}});
    context->saved_data["gated"] = gated;
    context->saved_data["adds"] = residual.has_value();
    context->saved_data["asked_for_sums"] = !gated && asks_for_gradient_sums(x_in);
    const at::Tensor out = shaped(y, x);
    if (is_reached(bias)) ask_for_gradient_sums(out);
    context->saved_data["asked_for_amax"] = asked_for_amax;
    if (!passes_on) return {out};
    const at::Tensor passed = shaped(read, x);
    pass_on_amax(passed, read);
    return {out, passed};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.activated_linear");
    const Restored restored = restore(*context);
    const at::Tensor& x = restored.saved[0];
    const bool gated = context->saved_data["gated"].toBool();
    const RestoredLinear& linear = restored.linears.front();
    const LinearParams params = linear.params();
    const at::Tensor passed = grads.size() > 1 ? grads[1] : at::Tensor();
    variable_list result(10);
    if (!grads[0].defined() && !passed.defined()) return result;
    OutputGradient d_out;
    at::Tensor dy = passed.defined() ? as_rows(passed).contiguous() : at::Tensor();
    if (grads[0].defined()) {
      d_out = output_gradient(params, grads[0]);
      dy = input_gradient(params, linear.kept.weight_amax, d_out, passed);
    }
    at::Tensor dx = at::empty_like(x), y;
    const at::Tensor amax = amax_to_raise(dx, context->saved_data["asked_for_amax"].toBool());
    const bool left_to_cast = gated && casts_swiglu(params.fp8);
    if (!left_to_cast) y = at::empty_like(dy);
    const at::Tensor sums = sums_to_fill(dx, context->saved_data["asked_for_sums"].toBool());
    const InUse in_use{x};
    gated ? kernels::swiglu_backward(dx, dy, x, amax, y) : kernels::gelu_backward(dx, dy, x, amax, y, sums);
    note_amax(dx, amax);
    note_column_sums(dx, sums);
    dy.reset();
    result[0] = dx;
    if (context->saved_data["adds"].toBool()) result[5] = grads[0];
    if (!grads[0].defined()) return result;
    const Fp8Source activated = left_to_cast ? Fp8Source::swiglu(as_rows(x)) : Fp8Source(y);
    const variable_list reported = deferrable_parameter_gradients(
        params, begin_input_factor(params, activated, linear.kept.input_amax).take(), d_out.factor());
    result[2] = reported[0];
    result[3] = reported[1];
    return result;
  }
};

/// A function that also reads trained weights gives all of its results a gradient, which a result of
/// something without one must not have.
bool wants_gradient(const at::Tensor& x) {
  return x.defined() && x.requires_grad();
}

}  // namespace

std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, at::TensorList weights,
                                                  const at::Tensor& bias, WeightLayout layout,
                                                  const std::optional<Fp8Recipe>& fp8,
                                                  const JointPtr& before) {
  const variable_list results = NormLinearFunction::apply(
      x, optional(delta), norm.weight, optional(norm.bias), norm.eps, weights, optional(bias),
      layout == WeightLayout::kInOut, fp8, before, asks_for_amax(fp8), /*passes_on=*/false);
  return {results[0], results[1]};
}

TappedNorm tapped_norm_linear(const at::Tensor& x, const at::Tensor& delta, const Norm& norm,
                              at::TensorList weights, const std::optional<Fp8Recipe>& read_by) {
  const std::optional<at::Tensor> absent;
  if (!wants_gradient(x) && !wants_gradient(delta) && !wants_gradient(norm.weight)) {
    const auto [sum, y] = norm.bias.defined()
                              ? add_layer_norm(x, delta, norm.weight, norm.bias, norm.eps, read_by)
                              : add_rms_norm(x, delta, norm.weight, norm.eps, read_by);
    const Tapped tapped = tapped_linear(y, weights);
    return {sum, tapped.made, tapped.passed};
  }
  const variable_list results = NormLinearFunction::apply(
      x, optional(delta), norm.weight, optional(norm.bias), norm.eps, weights, absent, /*in_out=*/false,
      std::optional<Fp8Recipe>(), JointPtr(), asks_for_amax(read_by), /*passes_on=*/true);
  return {results[0], results[1], results[2]};
}

at::Tensor activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                            const at::Tensor& bias, WeightLayout layout, const at::Tensor& residual,
                            const std::optional<Fp8Recipe>& fp8, const JointPtr& after) {
  return ActivatedLinearFunction::apply(x, activation == Activation::kSwiglu, weight, optional(bias),
                                        layout == WeightLayout::kInOut, optional(residual), fp8, after,
                                        asks_for_amax(fp8), /*passes_on=*/false)[0];
}

Tapped tapped_activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                               const std::optional<Fp8Recipe>& read_by, const JointPtr& after) {
  const std::optional<at::Tensor> absent;
  const bool gated = activation == Activation::kSwiglu;
  if (!wants_gradient(x))
    return tapped_linear(gated ? swiglu(x, read_by) : gelu(x, read_by), weight,
                         {.before = {}, .after = after});
  const variable_list results = ActivatedLinearFunction::apply(x, gated, weight, absent, /*in_out=*/false,
                                                               absent, std::optional<Fp8Recipe>(), after,
                                                               asks_for_amax(read_by), /*passes_on=*/true);
  return {results[0], results[1]};
}

}  // namespace trireme::nn
