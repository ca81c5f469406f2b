#include "trireme/plan/cuda_graphs.h"

#include <fmt/format.h>

#include <algorithm>

namespace trireme::plan {
namespace {

/// The last kernels of a pass take a few hundredths of the host's time for a small model.
constexpr double kMostLag = 0.15;

}  // namespace

std::string cuda_graphs_obstacle(const Config& config, bool gpu, int64_t ranks) {
  const ParallelConfig& parallel = config.parallel;
  const PrecisionConfig& precision = config.precision;
  if (!gpu) return "tensors live on the CPU";
  if (ranks > 1) return fmt::format("{} data-parallel ranks communicate within a pass", ranks);
  if (scales_loss(precision)) return "the scale of the loss changes between steps (precision.scaling)";
  if (wire_dtype(precision) != precision.compute) {
    return fmt::format("gradients change their dtype (precision.compute={}, precision.reduce={})",
                       precision.compute, precision.reduce);
  }
  if (parallel.comm_hook != CommHook::kNone) {
    return fmt::format("gradients pass through a hook (parallel.comm_hook={})", parallel.comm_hook);
  }
  if (parallel.reduce_when != ReduceWhen::kOncePerStep) {
    return fmt::format("micro-batches are reduced one by one (parallel.reduce_when={})",
                       parallel.reduce_when);
  }
  if (config.memory.recompute == Recompute::kBlock && config.model.dropout > 0.0) {
    return "blocks that are computed again draw the same random numbers again (memory.recompute=block with "
           "model.dropout)";
  }
  if (config.train.steps <= kStepsBeforeRecording) {
    return fmt::format("the first {} steps run without and train.steps={}", kStepsBeforeRecording,
                       config.train.steps);
  }
  return {};
}

bool device_waits_for_host(std::vector<double> lags) {
  if (lags.empty()) return false;
  const auto middle = lags.begin() + static_cast<std::ptrdiff_t>(lags.size() / 2);
  std::nth_element(lags.begin(), middle, lags.end());
  return *middle <= kMostLag;
}

}  // namespace trireme::plan
