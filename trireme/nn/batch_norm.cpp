#include "trireme/nn/batch_norm.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr auto kLayout = at::MemoryFormat::ChannelsLast;

class BatchNormFunction : public Function<BatchNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const std::optional<at::Tensor>& residual,
                            const kernels::BatchNormCall& call) {
    kernels::BatchNormCall mine = call;
    mine.residual = residual ? residual->contiguous(kLayout) : at::Tensor();
    at::Tensor y = at::empty_like(x);
    at::Tensor statistics = at::empty({4, x.size(1)}, x.options().dtype(at::kFloat));
    const InUse in_use{x, weight, bias, mine.residual};
    kernels::batch_norm_forward(y, statistics, x, weight, bias, mine);
    // On a GPU backward sees from x where ReLU let values pass, unless something was added to them.
    const bool keeps = call.relu && (residual || !x.is_cuda());
    context->save_for_backward({x, weight, bias, statistics, keeps ? y : at::Tensor()});
    context->saved_data["residual"] = residual.has_value();
    context->saved_data["relu"] = call.relu;
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_create_graph("nn.batch_norm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &statistics = saved[3],
                     &y = saved[4];
    const at::Tensor dy = grads[0].contiguous(kLayout);
    GradTarget d_weight(weight, GradTarget::kAsItIs), d_bias(bias, GradTarget::kAsItIs);
    at::Tensor dx = at::empty_like(x);
    const bool adds = context->saved_data["residual"].toBool(), relu = context->saved_data["relu"].toBool();
    at::Tensor d_residual = adds && relu ? at::empty_like(x) : at::Tensor();
    const InUse in_use{x, weight};
    kernels::batch_norm_backward(dx, d_residual, {d_weight.tensor(), d_weight.adds()},
                                 {d_bias.tensor(), d_bias.adds()}, dy, x, y, weight, statistics, relu);
    if (adds && !relu) d_residual = dy;
    return {dx, d_weight.reported(), d_bias.reported(), d_residual, {}};
  }
};

}  // namespace

at::Tensor batch_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const kernels::BatchNormCall& call) {
  return BatchNormFunction::apply(x, weight, bias, optional(call.residual), call);
}

}  // namespace trireme::nn
