#include "trireme/plan/kept_buffers.h"

#include <algorithm>
#include <optional>

#include "trireme/plan/flat_layout.h"

namespace trireme::plan {
namespace {

void keep(StepProgram& program, Role role, int64_t unit, int64_t bytes, std::optional<Role> part_of = {}) {
  program.buffers.push_back({role, unit, Action::kOnceAStep, bytes, part_of});
}

/// The first such action; none: there is none.
std::optional<int64_t> first_action(const StepProgram& program, ActionKind kind, int64_t unit) {
  const auto found = std::ranges::find_if(
      program.actions, [&](const Action& action) { return action.kind == kind && action.unit == unit; });
  if (found == program.actions.end()) return std::nullopt;
  return found - program.actions.begin();
}

/// Whole gradients that no pass uses get no memory: the fp32 sum is used as it is.
bool keeps_gradients(const UnitBuffers& memory, const EngineSetting& setting) {
  const bool only_sum = memory.sums_micro_batches_apart && !setting.copies_sum() && setting.accumulation > 1;
  return memory.gradients_stay && !only_sum;
}

/// A sum that comes and goes has memory from its reduction to the next use of the parameters.
void add_reduced(StepProgram& program, int64_t unit, const UnitBuffers& memory,
                 const EngineSetting& setting) {
  const int64_t bytes = kFp32Bytes * memory.updated;
  if (memory.reduced_in_gradients) return keep(program, Role::kReduced, unit, bytes, Role::kGradients);
  const auto first =
      memory.reduced_comes_and_goes ? first_action(program, ActionKind::kReduce, unit) : std::nullopt;
  if (!first) return keep(program, Role::kReduced, unit, bytes);
  const int64_t last = std::ssize(program.actions) - 1;
  const int64_t user = setting.use_from == UseFrom::kBuckets ? Action::kWholeModel : unit;
  const int64_t use = first_action(program, ActionKind::kForward, user).value_or(last);
  program.buffers.push_back(
      {Role::kReduced, unit, Action::kOnceAStep, bytes, {}, *first, use == *first ? last : use});
}

}  // namespace

void add_kept_buffers(StepProgram& program, const std::vector<UnitBuffers>& units,
                      const EngineSetting& setting) {
  for (int64_t unit = 0; unit < std::ssize(program.units); ++unit) {
    const UnitBuffers& memory = units[static_cast<size_t>(unit)];
    if (!memory.parameters_come_and_go)
      keep(program, Role::kParameters, unit, memory.whole_bytes + memory.frozen_bytes);
    if (memory.keeps_shard) keep(program, Role::kShard, unit, memory.shard_bytes + memory.frozen_shard_bytes);
    keep(program, Role::kMaster, unit, kFp32Bytes * memory.updated,
         memory.master_in_parameters ? std::optional(Role::kParameters)
         : memory.master_is_shard    ? std::optional(Role::kShard)
                                     : std::nullopt);
    keep(program, Role::kMoments, unit, memory.updated / FlatLayout::kAlignment * setting.moments);
    if (keeps_gradients(memory, setting))
      keep(program, Role::kGradients, unit, setting.compute_bytes * memory.whole);
    add_reduced(program, unit, memory, setting);
  }
}

}  // namespace trireme::plan
