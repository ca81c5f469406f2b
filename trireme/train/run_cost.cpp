#include "trireme/train/run_cost.h"

#include <algorithm>
#include <ranges>

#include "trireme/plan/memory.h"

namespace trireme::train {
namespace {

/// Of this rank between steps: without activations, and without memory that units share in turn.
RunCost predicted_cost(const Parts& parts) {
  const plan::Config& config = parts.config;
  const bool on_gpu = parts.on_gpu();
  const plan::Device device = on_gpu ? plan::Device::kCuda : plan::Device::kCpu;
  plan::EngineSetting setting =
      plan::engine_setting(config, parts.mesh.shape, parts.batch.accumulation, device);
  setting.stays = parts.model->stays_in_place();
  const plan::StepProgram program =
      plan::config_program(config, parts.held, parts.batch, setting, parts.mesh.pp_rank);
  plan::RankBytes needed =
      plan::rank_bytes(config, parts.held, parts.batch, program, device, parts.mesh.pp_rank);
  if (on_gpu) needed.baseline = 0;  // beside the allocator, whose peak is what is measured
  RunCost cost;
  cost.predicted = {needed.state.parameters, needed.state.gradients, needed.state.optimizer};
  cost.predicted_wire_bytes = plan::sent_bytes(program, setting, parts.batch.accumulation);
  cost.predicted_activation_bytes = needed.activations;
  cost.predicted_copy_bytes = needed.saved_copy;
  cost.predicted_gathered_bytes = needed.gathered;
  cost.predicted_peak_bytes = needed.peak();
  return cost;
}

}  // namespace

RunCost run_cost(const Parts& parts, const MeasuredCost& measured) {
  RunCost cost = predicted_cost(parts);
  const plan::StateBytes held = parts.model->state_bytes();
  cost.measured = {held.parameters, held.gradients, held.optimizer};
  // Ranks of a pipeline send and are predicted to send different amounts, and all may have different rows.
  const auto ranks =
      comm::gather_scalars(*parts.mesh.all, {static_cast<double>(measured.wire_bytes),
                                             static_cast<double>(cost.predicted_wire_bytes.value_or(0)),
                                             static_cast<double>(parts.model->passes().activation_bytes())});
  const auto largest = [&](size_t place) {
    const auto rank = std::ranges::max_element(ranks, {}, [&](const auto& row) { return row[place]; });
    return static_cast<int64_t>((*rank)[place]);
  };
  cost.measured_wire_bytes = largest(0);
  if (cost.predicted_wire_bytes) cost.predicted_wire_bytes = largest(1);
  if (const int64_t kept = largest(2); kept > 0) cost.measured_activation_bytes = kept;
  cost.measured_copy_bytes = measured.copy_bytes;
  cost.baseline_bytes = measured.baseline_bytes;
  if (measured.communication) {
    cost.communication_ms = measured.communication->busy_ms;
    cost.exposed_ms = measured.communication->exposed_ms;
  }
  return cost;
}

}  // namespace trireme::train
