#include "trireme/nn/group_norm.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class GroupNormFunction : public Function<GroupNormFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& bias, const std::optional<at::Tensor>& residual,
                            const kernels::GroupNormCall& call) {
    kernels::GroupNormCall mine = call;
    mine.residual = residual ? residual->contiguous(at::MemoryFormat::ChannelsLast) : at::Tensor();
    at::Tensor y = at::empty_like(x);
    at::Tensor statistics = at::empty({x.size(0), 2, call.groups}, x.options().dtype(at::kFloat));
    const InUse in_use{x, weight, bias, mine.residual};
    kernels::group_norm_forward(y, statistics, x, weight, bias, mine);
    context->save_for_backward({x, weight, bias, statistics, call.relu ? y : at::Tensor()});
    context->saved_data["residual"] = residual.has_value();
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_create_graph("nn.group_norm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &statistics = saved[3],
                     &y = saved[4];
    const at::Tensor dy = grads[0].contiguous(at::MemoryFormat::ChannelsLast);
    GradTarget d_weight(weight), d_bias(bias);
    at::Tensor dx = at::empty_like(x);
    const bool adds = context->saved_data["residual"].toBool();
    at::Tensor d_residual = adds && y.defined() ? at::empty_like(x) : at::Tensor();
    const InUse in_use{x, weight};
    kernels::group_norm_backward(dx, d_residual, d_weight.tensor(), d_bias.tensor(), dy, x, y, weight,
                                 statistics);
    if (adds && !y.defined()) d_residual = dy;
    return {dx, d_weight.reported(), d_bias.reported(), d_residual, {}};
  }
};

}  // namespace

at::Tensor group_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                      const kernels::GroupNormCall& call) {
  return GroupNormFunction::apply(x, weight, bias, optional(call.residual), call);
}

}  // namespace trireme::nn
