#include "trireme/nn/loss.h"

#include "trireme/kernels/cross_entropy.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class CrossEntropyFunction : public Function<CrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_in, const at::Tensor& targets,
                            bool want_gradient) {
    const at::Tensor logits = logits_in.contiguous();
    const int64_t classes = logits.size(-1);
    const int64_t rows = logits.numel() / classes;
    at::Tensor loss = at::empty({rows}, logits.options().dtype(at::kFloat));
    dispatch_float_or_bf16(logits, "cross_entropy", [&](auto scalar) {
      using Scalar = decltype(scalar);
      kernels::cross_entropy(loss.data_ptr<float>(), logits.data_ptr<Scalar>(), targets.data_ptr<int64_t>(),
                             rows, classes, want_gradient);
    });
    context->save_for_backward({logits});
    return loss.mean();
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::Tensor gradient = context->get_saved_variables()[0];
    const double rows = static_cast<double>(gradient.numel() / gradient.size(-1));
    gradient.mul_(grads[0].item<double>() / rows);
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  TRIREME_CHECK(logits.numel() / logits.size(-1) == targets.numel(),
                "[nn.cross_entropy] {} rows of logits, {} targets", logits.numel() / logits.size(-1),
                targets.numel());
  if (logits.is_cuda()) {
    return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}).to(at::kFloat),
                                  targets.reshape({-1}));
  }
  const bool want_gradient = logits.requires_grad() && at::GradMode::is_enabled();
  return CrossEntropyFunction::apply(logits, targets.contiguous(), want_gradient);
}

}  // namespace trireme::nn
