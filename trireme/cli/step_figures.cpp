#include "trireme/cli/step_figures.h"

#include <algorithm>

#include "trireme/plan/cuda_graphs.h"
#include "trireme/plan/held_parameters.h"
#include "trireme/plan/stage_program.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::cli {

using plan::Action;
using plan::ActionKind;
using plan::HeldBytes;
using plan::Role;
using plan::StepProgram;

std::string unit_name(const StepProgram& program, int64_t unit) {
  return unit == Action::kWholeModel ? "all" : program.units[static_cast<size_t>(unit)].name;
}

namespace {

/// For actions of some kinds.
int64_t sent_for(const StepView& view, std::initializer_list<ActionKind> kinds) {
  StepProgram program = view.program;
  for (Action& action : program.actions) {
    if (std::ranges::find(kinds, action.kind) == kinds.end()) action.transfers.clear();
  }
  return program.wire_bytes(view.micro_batches);
}

}  // namespace

Sent sent_by(const StepView& view) {
  Sent sent{.parameters = sent_for(view, {ActionKind::kUnshard}),
            .gradients = sent_for(view, {ActionKind::kSumTied, ActionKind::kReduce, ActionKind::kGatherSum}),
            .boundaries = sent_for(view, {ActionKind::kSend, ActionKind::kRecv}),
            .activations = sent_for(view, {ActionKind::kForward, ActionKind::kBackward,
                                           ActionKind::kBackwardInput, ActionKind::kBackwardWeight})};
  if (!view.planned) return sent;
  const RunPlan& run = *view.planned;
  const plan::Config& config = run.config;
  const auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
  const std::optional<int64_t> all = plan::sent_bytes(view.program, setting, view.micro_batches);
  if (!all) sent.gradients.reset();
  // Averages are sent, too, and no action of the program sends them.
  if (all) sent.parameters += *all - view.program.wire_bytes(view.micro_batches);
  return sent;
}

StepMemory::StepMemory(const StepProgram& program)
    : kept_(kept_bytes(program)), held_(held_bytes(program)), freed_(held_.size()) {
  for (const plan::Buffer& buffer : program.buffers) {
    if (!buffer.is_kept() && !buffer.part_of) freed_[static_cast<size_t>(buffer.to)] += buffer.bytes;
  }
  const auto most = std::ranges::max_element(held_, {}, &HeldBytes::total);
  peak_ = most - held_.begin();
}

int64_t StepMemory::extra(int64_t action, std::initializer_list<Role> roles) const {
  int64_t sum = 0;
  for (const Role role : roles) sum += at(action)[role] - kept_[role];
  return sum;
}

std::string obstacle_to_recording(const StepView& view) {
  const std::string obstacle = plan::recording_obstacle(view.program);
  if (!obstacle.empty() || !view.planned) return obstacle;
  const RunPlan& run = *view.planned;
  const plan::Config& config = run.config;
  return plan::cuda_graphs_obstacle(config, run.device == plan::Device::kCuda, run.mesh.dp_size());
}

int64_t pp_rank_of(const RunPlan& run, std::optional<int64_t> rank) {
  return run.mesh.coordinates(rank.value_or(0))[static_cast<size_t>(plan::Axis::kPp)];
}

Ranges ranges_of(const RunPlan& run, int64_t rank, int64_t numel) {
  const plan::Config& config = run.config;
  auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
  if (run.pipeline) setting = plan::setting_in_stages(setting, run.pipeline->schedule);
  const plan::UnitBuffers buffers(numel, setting);
  const int64_t shard =
      buffers.shard * (plan::place_in_engine(run.mesh, setting, rank) % setting.shard_ranks());
  Ranges ranges{0, numel, 0, numel};
  if (buffers.parameters_come_and_go) ranges.begin = shard, ranges.end = shard + buffers.shard;
  if (buffers.updated != buffers.whole)
    ranges.update_begin = shard, ranges.update_end = shard + buffers.shard;
  return ranges;
}

}  // namespace trireme::cli
