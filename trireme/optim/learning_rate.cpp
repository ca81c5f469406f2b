#include "trireme/optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace trireme::optim {

double learning_rate(const plan::OptimConfig& config, int64_t step, int64_t steps) {
  if (step <= config.warmup_steps) {
    return config.lr * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
  }
  if (config.schedule == "constant") return config.lr;
  const double span = static_cast<double>(std::max<int64_t>(1, steps - config.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - config.warmup_steps) / span);
  const double left =
      config.schedule == "linear" ? 1.0 - progress : 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return config.min_lr + (config.lr - config.min_lr) * left;
}

}  // namespace trireme::optim
