#include "trireme/nn/swiglu_feed_forward.h"

#include "trireme/nn/autograd.h"
#include "trireme/nn/linear_parts.h"

namespace trireme::nn {
namespace {

using kernels::Fp8Source;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class SwigluFeedForwardFunction : public Function<SwigluFeedForwardFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, at::TensorList gate_up,
                            const at::Tensor& down, const at::Tensor& residual, const Fp8Recipe& in,
                            const Fp8Recipe& out, Output output, KeepInput keep, const JointPtr& joint) {
    const at::Tensor no_bias;
    const LinearParams first{gate_up, no_bias, false, in, {.before = joint, .after = {}}},
        second{at::TensorList(down), no_bias, false, out, {.before = {}, .after = joint}};
    LinearKept of_first, of_second;
    const at::Tensor hidden = apply_linear(first, as_rows(x), {}, of_first, keep);
    const at::Tensor y = apply_linear(second, Fp8Source::swiglu(hidden), residual, of_second, keep, output);
    save(*context, {hidden}, {{first, of_first}, {second, of_second}});
    return shaped(y, x);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.swiglu_feed_forward");
    const Restored restored = restore(*context);
    const RestoredLinear &of_first = restored.linears[0], &of_second = restored.linears[1];
    const LinearParams first = of_first.params(), second = of_second.params();
    at::Tensor d_activated;
    variable_list d_down;
    {
      OutputGradient dy = output_gradient(second, grads[0]);
      d_activated = input_gradient(second, of_second.kept.weight_amax, dy);
      d_down = deferrable_parameter_gradients(second, of_second.kept.input, dy.factor());
    }
    OutputGradient d_hidden =
        output_gradient(first, Fp8Source::swiglu_gradient(restored.saved[0], d_activated));
    d_activated.reset();
    variable_list result(1);
    ArrivingFactor input = begin_input_factor(first, of_first.kept);
    InputGradient dx;
    if (context->needs_input_grad(0)) dx = begin_input_gradient(first, of_first.kept.weight_amax, d_hidden);
    const variable_list d_gate_up = deferrable_parameter_gradients(first, input.take(), d_hidden.factor());
    if (context->needs_input_grad(0)) result[0] = shaped(dx.take(), grads[0]);
    result.insert(result.end(), d_gate_up.begin(), d_gate_up.end() - 1);  // without the bias
    result.push_back(d_down.front());
    result.push_back(grads[0]);        // residual
    result.resize(result.size() + 5);  // in, out, output, keep, joint
    return result;
  }
};

}  // namespace

bool casts_swiglu(const std::optional<Fp8Recipe>& fp8) {
  return fp8 && (fp8->scaling == kernels::Fp8Scaling::kBlock || fp8->layer.amax.defined());
}

at::Tensor swiglu_feed_forward(const at::Tensor& x, at::TensorList gate_up, const at::Tensor& down,
                               const at::Tensor& residual, const Fp8Recipe& in, const Fp8Recipe& out,
                               Output output, const JointPtr& joint) {
  std::vector<at::Tensor> weights = gate_up.vec();
  weights.push_back(down);
  return SwigluFeedForwardFunction::apply(x, gate_up, down, residual, in, out, output,
                                          keep_for_backward(weights, {}), joint);
}

}  // namespace trireme::nn
