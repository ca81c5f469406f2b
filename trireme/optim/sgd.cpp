#include "trireme/kernels/tensor_ops.h"
#include "trireme/optim/flat_optimizer.h"

namespace trireme::optim {
namespace {

/// Momentum as torch.optim.SGD has it, Nesterov's too; state: the velocity, which the first step sets.
class Sgd : public FlatOptimizer {
 public:
  using FlatOptimizer::FlatOptimizer;

 private:
  void update_range(UpdateRange& range, const GradScale& grad_scale) override {
    kernels::sgd(range.master, range.moments, range.grad, range.copy, range.parts,
                 {static_cast<float>(config().momentum), static_cast<float>(grad_scale.host),
                  step_number() == 1, config().nesterov},
                 grad_scale.device);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  return std::make_unique<Sgd>(config, std::move(params));
}

}  // namespace trireme::optim
