#include "trireme/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace trireme::optim {

namespace {

/// How often the rate has dropped when `step` is made: before step_every + 1 steps after warm-up have begun,
/// never.
double drops(const plan::OptimConfig& config, int64_t step, int64_t steps) {
  const int64_t after = step - config.warmup_steps - 1, all = steps - config.warmup_steps;
  const int64_t every = config.step_every > 0 ? config.step_every : std::max<int64_t>(1, (all + 2) / 3);
  return static_cast<double>(after / every);
}

/// From min_lr at the first step to lr at the last, by one factor a step.
double rising(const plan::OptimConfig& config, int64_t step, int64_t steps) {
  const double progress =
      steps > 1 ? std::min(1.0, static_cast<double>(step - 1) / static_cast<double>(steps - 1)) : 1.0;
  return config.min_lr * std::pow(config.lr / config.min_lr, progress);
}

}  // namespace

double learning_rate(const plan::OptimConfig& config, int64_t step, int64_t steps) {
  if (step <= config.warmup_steps) {
    return config.lr * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
  }
  const double span = static_cast<double>(std::max<int64_t>(1, steps - config.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - config.warmup_steps) / span);
  const auto between = [&](double left) { return config.min_lr + (config.lr - config.min_lr) * left; };
  switch (config.schedule) {
    case plan::LrSchedule::kCosine:
      return between(0.5 * (1.0 + std::cos(std::numbers::pi * progress)));
    case plan::LrSchedule::kLinear:
      return between(1.0 - progress);
    case plan::LrSchedule::kSteps:
      return std::max(config.min_lr, config.lr * std::pow(config.step_factor, drops(config, step, steps)));
    case plan::LrSchedule::kRange:
      return rising(config, step, steps);
    case plan::LrSchedule::kConstant:
      break;
  }
  return config.lr;
}

}  // namespace trireme::optim
