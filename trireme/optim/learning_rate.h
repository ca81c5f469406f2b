#pragma once
#include <cstdint>

#include "trireme/plan/config.h"

namespace trireme::optim {

/// The learning rate of step 1..steps: linear warm-up to `lr` over warmup_steps (step k of w gets k/w), then
/// constant, linear or half-cosine decay to min_lr at the last step, or multiplied by step_factor every so
/// many steps as torch.optim.lr_scheduler.StepLR does, but never below min_lr. The schedule range has no
/// warm-up: it rises from min_lr at the first step to lr at the last, by one factor a step.
double learning_rate(const plan::OptimConfig& config, int64_t step, int64_t steps);

}  // namespace trireme::optim
