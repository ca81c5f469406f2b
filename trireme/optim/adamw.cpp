#include <cmath>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/optim/flat_optimizer.h"

namespace trireme::optim {
namespace {

/// Loshchilov and Hutter 2019; state: the averages of gradients and of their squares.
class AdamW : public FlatOptimizer {
 public:
  using FlatOptimizer::FlatOptimizer;

 private:
  float bias_correction(double beta) const {
    return static_cast<float>(1.0 - std::pow(beta, static_cast<double>(step_number())));
  }

  void update_range(UpdateRange& range, const GradScale& grad_scale) override {
    kernels::AdamWStep step{};
    step.beta1 = static_cast<float>(config().beta1);
    step.beta2 = static_cast<float>(config().beta2);
    step.eps = static_cast<float>(config().eps);
    step.bias_correction1 = bias_correction(config().beta1);
    step.bias_correction2 = bias_correction(config().beta2);
    step.grad_scale = static_cast<float>(grad_scale.host);
    kernels::adamw(range.master, range.moments, range.grad, range.copy, range.parts, step, grad_scale.device);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  return std::make_unique<AdamW>(config, std::move(params));
}

}  // namespace trireme::optim
