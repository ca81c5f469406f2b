#include <ATen/ops/_fused_adamw.h>

#include <cmath>

#include "trireme/kernels/optimizer.h"
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
  void update(size_t i, double lr, double grad_scale) override {
    params_[i].master.is_cuda() ? step_gpu(params_[i], states_[i], lr, grad_scale)
                                : step_cpu(params_[i], states_[i], lr, grad_scale);
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

  void step_cpu(const FlatParam& param, const State& state, double lr, double grad_scale) const {
    kernels::AdamWStep step{};
    step.lr = static_cast<float>(lr);
    step.beta1 = static_cast<float>(config_.beta1);
    step.beta2 = static_cast<float>(config_.beta2);
    step.eps = static_cast<float>(config_.eps);
    step.bias_correction1 = static_cast<float>(1.0 - std::pow(config_.beta1, static_cast<double>(steps_)));
    step.bias_correction2 = static_cast<float>(1.0 - std::pow(config_.beta2, static_cast<double>(steps_)));
    step.grad_scale = static_cast<float>(grad_scale);
    for (const Segment& segment : param.segments) {
      const int64_t first = segment.range.begin;
      step.weight_decay = segment.decay ? static_cast<float>(config_.weight_decay) : 0.0f;
      kernels::adamw(param.master.data_ptr<float>() + first, state.exp_avg.data_ptr<float>() + first,
                     state.exp_avg_sq.data_ptr<float>() + first, param.grad.data_ptr<float>() + first,
                     param.copy.defined() ? param.copy.data_ptr<c10::BFloat16>() + first : nullptr,
                     segment.range.size(), step);
    }
  }

  void step_gpu(const FlatParam& param, const State& state, double lr, double grad_scale) const {
    if (grad_scale != 1.0) param.grad.mul_(grad_scale);
    for (const bool decay : {true, false}) {
      std::vector<at::Tensor> masters, grads, averages, squares, counts;
      for (const Segment& segment : param.segments) {
        if (segment.decay != decay) continue;
        const auto part = [&](const at::Tensor& whole) {
          return whole.narrow(0, segment.range.begin, segment.range.size());
        };
        masters.push_back(part(param.master));
        grads.push_back(part(param.grad));
        averages.push_back(part(state.exp_avg));
        squares.push_back(part(state.exp_avg_sq));
        counts.push_back(at::full({}, static_cast<double>(steps_), param.master.options()));
      }
      if (masters.empty()) continue;
      at::_fused_adamw_(masters, grads, averages, squares, {}, counts, lr, config_.beta1, config_.beta2,
                        decay ? config_.weight_decay : 0.0, config_.eps, false, false);
    }
    if (param.copy.defined()) {
      at::Tensor copy = param.copy;
      copy.copy_(param.master);
    }
  }

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
