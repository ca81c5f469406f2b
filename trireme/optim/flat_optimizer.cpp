#include "trireme/optim/flat_optimizer.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/plan/optimizer.h"

namespace trireme::optim {

FlatOptimizer::FlatOptimizer(const plan::OptimConfig& config, std::vector<FlatParam> params)
    : Optimizer(config.lr), config_(config), params_(std::move(params)) {
  const size_t count = plan::state_of(config).size();
  for (const FlatParam& param : params_) {
    std::vector<at::Tensor>& state = states_.emplace_back();
    for (size_t i = 0; i < count; ++i) state.push_back(at::zeros_like(param.master));
    if (config.ema > 0.0) state.back().copy_(param.master);  // of what is frozen until later
  }
}

void FlatOptimizer::set_segments(size_t index, std::vector<Segment> segments) {
  params_[index].segments = merged(segments);
}

void FlatOptimizer::update(size_t index, const GradScale& grad_scale) {
  const FlatParam& param = params_[index];
  for (const Segment& segment : param.segments) {
    UpdateRange range{.master = part_of(param.master, segment),
                      .grad = part_of(param.grad, segment),
                      .copy = part_of(param.copy, segment),
                      .state = {},
                      .lr = lr() * segment.group.lr_factor,
                      .weight_decay = config_.weight_decay * segment.group.decay_factor};
    for (const at::Tensor& state : states_[index]) range.state.push_back(part_of(state, segment));
    update_range(range, grad_scale);
    if (config_.ema > 0.0) average(range.state.back(), range.master);
  }
}

/// The first step's parameters begin it. On a CPU products and sums are operators of their own: a fused one
/// would round an element by where it lies.
void FlatOptimizer::average(at::Tensor& average, const at::Tensor& master) const {
  const double weight = 1.0 - config_.ema;
  if (steps_ == 1) {
    average.copy_(master);
  } else if (average.is_cuda()) {
    average.lerp_(master, weight);
  } else {
    average.add_((master - average).mul_(weight));
  }
}

void FlatOptimizer::swap_average(size_t index) {
  TRIREME_CHECK(config_.ema > 0.0, "[optim] no averages are kept: optim.ema is 0");
  if (steps_ == 0) return;  // there are none yet
  const FlatParam& param = params_[index];
  for (const Segment& segment : param.segments) {
    at::Tensor master = part_of(param.master, segment);
    at::Tensor average = part_of(states_[index].back(), segment);
    const at::Tensor held = master.clone();
    master.copy_(average);
    average.copy_(held);
    if (at::Tensor copy = part_of(param.copy, segment); copy.defined()) copy.copy_(master);
  }
}

int64_t FlatOptimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const std::vector<at::Tensor>& tensors : states_) {
    for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

std::vector<NamedState> FlatOptimizer::state(size_t index) const {
  std::vector<NamedState> state;
  const auto names = plan::state_of(config_);
  for (size_t i = 0; i < names.size(); ++i) state.push_back({names[i], states_[index][i]});
  return state;
}

}  // namespace trireme::optim
