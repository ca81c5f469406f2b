// Operations that write their operands, on a rank's parts: those of the trainer's optimizers.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/tensor/local_ops.h"

namespace trireme::tensor::local {
namespace {

using kernels::Moment;
using kernels::MomentKind;
using plan::Op;

/// An operand's elements in a row in fp32: its own memory where that is so, else a copy, which store() puts
/// back.
class Numbers {
 public:
  explicit Numbers(const at::Tensor& operand)
      : operand_(operand.detach()), flat_(operand_.to(at::kFloat).contiguous().view({-1})) {}

  at::Tensor& flat() { return flat_; }
  /// Tells autograd, too, that the operand has other values now.
  void store() {
    if (flat_.is_alias_of(operand_)) return torch::autograd::impl::bump_version(operand_);
    operand_.copy_(flat_.view(operand_.sizes()));
  }

 private:
  at::Tensor operand_, flat_;
};

kernels::UpdatePart all_of(const at::Tensor& param, double lr, double weight_decay) {
  return {0, param.numel(), static_cast<float>(lr), static_cast<float>(weight_decay)};
}

void adamw(const OpCall& call, const Tensors& in) {
  const auto& [lr, beta1, beta2, eps, weight_decay] = call.attributes.real;
  const auto count = static_cast<double>(call.attributes.whole[0]);
  Numbers param(in[0]), grad(in[1]), average(in[2]), squares(in[3]);
  const kernels::AdamWStep step = {.beta1 = static_cast<float>(beta1),
                                   .beta2 = static_cast<float>(beta2),
                                   .eps = static_cast<float>(eps),
                                   .bias_correction1 = static_cast<float>(1.0 - std::pow(beta1, count)),
                                   .bias_correction2 = static_cast<float>(1.0 - std::pow(beta2, count)),
                                   .grad_scale = 1.0f};
  const kernels::MomentsOfRange moments = {{Moment::in(average.flat(), kernels::adamw_moment(0)),
                                            Moment::in(squares.flat(), kernels::adamw_moment(1))}};
  at::Tensor no_copy;
  const auto part = all_of(param.flat(), lr, weight_decay);
  kernels::adamw(param.flat(), moments, grad.flat(), no_copy, {&part, 1}, step);
  for (Numbers* const written : {&param, &average, &squares}) written->store();
}

void sgd(const OpCall& call, const Tensors& in) {
  const auto& [lr, momentum, weight_decay, unused, none] = call.attributes.real;
  Numbers param(in[0]), grad(in[1]);
  const bool has_buffer = in.size() > 2;
  Numbers buffer(has_buffer ? in[2] : at::zeros_like(in[0], at::kFloat));
  // Without a buffer each step is the first one, which takes the gradient alone.
  const kernels::SgdStep step = {
      .momentum = static_cast<float>(momentum), .grad_scale = 1.0f, .first = !has_buffer};
  at::Tensor no_copy;
  const auto part = all_of(param.flat(), lr, weight_decay);
  const kernels::MomentsOfRange moments = {{Moment::in(buffer.flat(), kernels::sgd_moment(0))}};
  kernels::sgd(param.flat(), moments, grad.flat(), no_copy, {&part, 1}, step);
  param.store();
  buffer.store();
}

}  // namespace

Tensors updated(const OpCall& call, const Tensors& in) {
  const at::NoGradGuard no_grad;
  if (in[0].numel() == 0) return {};
  if (call.op == Op::kAdamw) {
    adamw(call, in);
  } else if (call.op == Op::kSgd) {
    sgd(call, in);
  } else if (call.op == Op::kAddInto) {
    in[0].add_(in[1]);
  } else {
    in[0].copy_(in[1]);
  }
  return {};
}

}  // namespace trireme::tensor::local
