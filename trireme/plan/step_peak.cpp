#include "trireme/plan/step_peak.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/plan/large_bytes.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {
namespace {

constexpr std::initializer_list<Role> kGathered = {Role::kParameters, Role::kSlice, Role::kGradients,
                                                   Role::kSum, Role::kReduced};

bool is_backward(ActionKind kind) {
  return computes(kind) && kind != ActionKind::kForward;
}

/// The action of a pass that computes, its first or its last one; none: nothing in it does.
std::optional<int64_t> computing(const StepProgram& program, const Pass& pass, bool last) {
  std::optional<int64_t> found;
  for (int64_t at = pass.begin; at < pass.end; ++at) {
    if (!program.actions[static_cast<size_t>(at)].computes()) continue;
    found = at;
    if (!last) break;
  }
  return found;
}

/// Micro-batches of the stage that makes the loss, at an action.
struct InFlight {
  int64_t made = 0, again = 0;        ///< whose loss it makes, and whose backward pass it begins
  int64_t kept = 0, activations = 0;  ///< whose loss and activations are held
};

std::vector<InFlight> in_flight_at_actions(const StepProgram& program, int64_t stage) {
  std::vector<InFlight> at(program.actions.size() + 1);  // of kept and activations first what changes
  std::map<int64_t, size_t> made;                        // by micro-batch, the action that made its loss
  for (const Pass& pass : program.passes) {
    if (pass.stage != stage) continue;
    const bool forward = pass.kind == Pass::Kind::kForward;
    const auto action = computing(program, pass, /*last=*/forward);
    if (!action) continue;
    const auto here = static_cast<size_t>(*action);
    if (forward) {
      made[pass.micro_batch] = here;
      ++at[here].made;
    } else if (const auto begun = made.extract(pass.micro_batch)) {
      ++at[here].again;
      ++at[begun.mapped()].kept;
      --at[here].kept;
      ++at[begun.mapped()].activations;
      --at[here + 1].activations;
    }
  }
  for (size_t action = 1; action < at.size(); ++action) {
    at[action].kept += at[action - 1].kept;
    at[action].activations += at[action - 1].activations;
  }
  return at;
}

int64_t loss_bytes(const InFlight& now, const BesideProgram& beside) {
  return bounded_sum({bounded_product(now.made, beside.loss_at_work),
                      bounded_product(now.again, beside.loss_again),
                      bounded_product(now.kept, beside.loss_kept)});
}

/// The stage of each unit, by the passes that run it.
std::vector<int64_t> stages_of_units(const StepProgram& program) {
  std::vector<int64_t> stages(program.units.size());
  for (const Action& action : program.actions)
    if (action.computes() && action.unit >= 0) stages[static_cast<size_t>(action.unit)] = action.stage;
  return stages;
}

/// The least piece of a stage's pool, as DataParallel::symmetric_pool() has it: that of its largest block.
/// The first unit of a stage is its root.
std::map<int64_t, int64_t> least_pieces(const StepProgram& program, const std::vector<int64_t>& stages) {
  std::map<int64_t, int64_t> roots, least;
  for (size_t unit = stages.size(); unit-- > 0;) roots[stages[unit]] = static_cast<int64_t>(unit);
  for (const Buffer& buffer : program.buffers) {
    if (buffer.role != Role::kGradients) continue;
    const int64_t stage = stages[static_cast<size_t>(buffer.unit)];
    const bool is_head = program.units[static_cast<size_t>(buffer.unit)].name == kHeadUnit;
    if (buffer.unit != roots[stage] && !is_head) least[stage] = std::max(least[stage], buffer.bytes);
  }
  return least;
}

/// The sizes of whole gradients that come and go, each as often as units of a stage hold one at once.
int64_t pool_of_gradients(const StepProgram& program) {
  const std::vector<int64_t> stages = stages_of_units(program);
  std::map<int64_t, int64_t> least = least_pieces(program, stages);
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> changes;  // by stage and size
  for (const Buffer& buffer : program.buffers) {
    if (buffer.role != Role::kGradients || buffer.is_kept() || buffer.part_of) continue;
    const int64_t stage = stages[static_cast<size_t>(buffer.unit)];
    std::vector<int64_t>& of_size = changes[{stage, std::max(buffer.bytes, least[stage])}];
    of_size.resize(program.actions.size() + 1);
    ++of_size[static_cast<size_t>(buffer.from)];
    --of_size[static_cast<size_t>(buffer.to) + 1];
    if (buffer.from > buffer.to) ++of_size[0];  // from the step before
  }
  int64_t bytes = 0;
  for (const auto& [piece, of_size] : changes) {
    int64_t now = 0, most = 0;
    for (const int64_t change : of_size) most = std::max(most, now += change);
    bytes += most * piece.second;
  }
  return bytes;
}

/// The most that units in flight hold, and the sums of all.
int64_t pool_of_gathered(const StepProgram& program) {
  int64_t bytes = gathered_bytes(program);
  for (const Buffer& buffer : program.buffers)
    if (buffer.role == Role::kReduced && !buffer.is_kept() && !buffer.part_of) bytes += buffer.bytes;
  return bytes;
}

/// At an action, with what is pooled.
int64_t gathered_at(const HeldBytes& held, const HeldBytes& kept, Pooled pooled, int64_t pool) {
  if (pooled == Pooled::kGathered) return pool;
  int64_t bytes = pool;
  for (const Role role : kGathered)
    if (pooled == Pooled::kNothing || role != Role::kGradients) bytes += held[role] - kept[role];
  return bytes;
}

}  // namespace

int64_t gathered_bytes(const StepProgram& program) {
  constexpr Role kRoles[] = {Role::kParameters, Role::kSlice, Role::kGradients, Role::kSum};
  const HeldBytes kept = kept_bytes(program);
  int64_t most = 0;
  for (const HeldBytes& held : held_bytes(program)) {
    int64_t sum = 0;
    for (const Role role : kRoles) sum += held[role] - kept[role];
    most = std::max(most, sum);
  }
  return most;
}

int64_t StepPeak::total() const {
  return bounded_sum({kept, gathered, activations, boundaries, for_loss, in_backward, decoded});
}

StepPeak peak_of_step(const StepProgram& program, const BesideProgram& beside) {
  const HeldBytes kept = kept_bytes(program);
  const std::vector<HeldBytes> held = held_bytes(program);
  const std::vector<InFlight> in_flight = in_flight_at_actions(program, beside.loss_stage);
  const int64_t pool = beside.pooled == Pooled::kGathered         ? pool_of_gathered(program)
                       : beside.pooled == Pooled::kWholeGradients ? pool_of_gradients(program)
                                                                  : 0;
  StepPeak most;
  for (size_t at = 0; at < held.size(); ++at) {
    const ActionKind kind = program.actions[at].kind;
    const StepPeak now{
        .action = static_cast<int64_t>(at),
        .kept = kept.total() - kept[Role::kBoundary],
        .gathered = gathered_at(held[at], kept, beside.pooled, pool),
        .activations = bounded_sum(
            {held[at][Role::kActivations], bounded_product(in_flight[at].activations, beside.activations)}),
        .boundaries = held[at][Role::kBoundary],
        .for_loss = loss_bytes(in_flight[at], beside),
        .in_backward = is_backward(kind) ? beside.in_backward : 0,
        .decoded = computes(kind) ? beside.decoded : 0};
    if (now.total() > most.total()) most = now;
  }
  return most;
}

}  // namespace trireme::plan
