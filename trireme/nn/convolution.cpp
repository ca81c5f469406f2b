#include "trireme/nn/convolution.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr auto kTurned = at::MemoryFormat::ChannelsLast;

/// Whether the kernel is 1x1: then both layouts are the same bytes.
bool is_point(const at::Tensor& weight) {
  return weight.size(2) == 1 && weight.size(3) == 1;
}

at::Tensor channels_last(const at::Tensor& weight) {
  const int64_t in = weight.size(1);
  if (is_point(weight)) return weight.as_strided(weight.sizes(), {in, 1, in, in});
  at::Tensor turned = at::empty_like(weight, weight.options(), kTurned);
  kernels::turn_conv_weights(turned, weight);
  return turned;
}

class ConvFunction : public Function<ConvFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            int64_t stride, int64_t padding) {
    const InUse in_use{x, weight};
    const at::Tensor turned = channels_last(weight);
    // The weight is saved too: torch then notices where it is changed before backward.
    context->save_for_backward({x, weight, is_point(weight) ? at::Tensor() : turned});
    context->saved_data["stride"] = stride;
    context->saved_data["padding"] = padding;
    return at::convolution(x, turned, /*bias=*/{}, {stride, stride}, {padding, padding}, /*dilation=*/{1, 1},
                           /*transposed=*/false, /*output_padding=*/{0, 0}, /*groups=*/1);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    refuse_create_graph("nn.conv2d");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor turned = saved[2].defined() ? saved[2] : channels_last(weight);
    const int64_t stride = context->saved_data["stride"].toInt();
    const int64_t padding = context->saved_data["padding"].toInt();
    const bool to_x = context->needs_input_grad(0), to_weight = context->needs_input_grad(1);
    const auto [dx, d_weight, d_bias] = at::convolution_backward(
        grads[0], x, turned, /*bias_sizes=*/at::OptionalIntArrayRef(), {stride, stride}, {padding, padding},
        /*dilation=*/{1, 1}, /*transposed=*/false, /*output_padding=*/{0, 0}, /*groups=*/1,
        {to_x, to_weight, false});
    return {dx, to_weight ? add_gradient(weight, d_weight) : at::Tensor(), {}, {}};
  }

 private:
  /// Adds the gradient in place; returns what is left for autograd to add.
  static at::Tensor add_gradient(const at::Tensor& weight, const at::Tensor& gradient) {
    GradTarget target(weight, AddsTo::kFp32Too, GradTarget::kAsItIs);
    kernels::add_conv_weights({target.tensor(), target.adds()}, gradient.contiguous(kTurned));
    return target.reported();
  }
};

bool takes(const at::Tensor& x, const at::Tensor& weight) {
  return x.dim() == 4 && x.numel() > 0 && x.scalar_type() == weight.scalar_type() &&
         x.suggest_memory_format() == kTurned && kernels::can_turn(weight);
}

}  // namespace

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding) {
  if (takes(x, weight)) return ConvFunction::apply(x, weight, stride, padding);
  return at::conv2d(x, weight, /*bias=*/{}, {stride, stride}, {padding, padding});
}

}  // namespace trireme::nn
