#include <cmath>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/optim/optimizer.h"

namespace trireme::optim {
namespace {

class AdamW : public Optimizer {
 public:
  AdamW(const plan::OptimConfig& config, std::vector<FlatParam> params)
      : config_(config), params_(std::move(params)) {
    for (const FlatParam& param : params_) {
      states_.push_back({at::zeros_like(param.master), at::zeros_like(param.master)});
    }
  }

  void begin_step() override { ++steps_; }
  size_t size() const override { return params_.size(); }
  void update(size_t i, double lr, const GradScale& grad_scale) override {
    const FlatParam& param = params_[i];
    kernels::AdamWStep step{};
    step.lr = static_cast<float>(lr);
    step.beta1 = static_cast<float>(config_.beta1);
    step.beta2 = static_cast<float>(config_.beta2);
    step.eps = static_cast<float>(config_.eps);
    step.bias_correction1 = static_cast<float>(1.0 - std::pow(config_.beta1, static_cast<double>(steps_)));
    step.bias_correction2 = static_cast<float>(1.0 - std::pow(config_.beta2, static_cast<double>(steps_)));
    step.grad_scale = static_cast<float>(grad_scale.host);
    for (const Segment& segment : param.segments) {
      at::Tensor master = part_of(param.master, segment), copy = part_of(param.copy, segment);
      at::Tensor exp_avg = part_of(states_[i].exp_avg, segment);
      at::Tensor exp_avg_sq = part_of(states_[i].exp_avg_sq, segment);
      step.weight_decay = segment.decay ? static_cast<float>(config_.weight_decay) : 0.0f;
      kernels::adamw(master, exp_avg, exp_avg_sq, part_of(param.grad, segment), copy, step,
                     grad_scale.device);
    }
  }

  int64_t state_bytes() const override {
    int64_t bytes = 0;
    for (const State& state : states_) bytes += state.exp_avg.nbytes() + state.exp_avg_sq.nbytes();
    return bytes;
  }

 private:
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
  };

  plan::OptimConfig config_;
  std::vector<FlatParam> params_;
  std::vector<State> states_;
  int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  return std::make_unique<AdamW>(config, std::move(params));
}

}  // namespace trireme::optim
