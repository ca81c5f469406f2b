// What is wrong with a step program, and what keeps its passes from being recorded.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/plan/step_laws.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {
namespace {

/// Walks over the actions and knows what each unit has been through.
class Verifier {
 public:
  explicit Verifier(const StepProgram& program) : program_(program) {}
  void run();

 private:
  std::string name_of(int64_t unit) const {
    return unit == Action::kWholeModel ? "the model" : program_.units[static_cast<size_t>(unit)].name;
  }
  bool has(Role role, int64_t unit, int64_t micro_batch = Action::kOnceAStep) const;
  bool knows_activations(int64_t unit) const {
    return unit != Action::kWholeModel && program_.units[static_cast<size_t>(unit)].activation_bytes > 0;
  }
  bool keeps_between_halves(int64_t unit) const {
    return unit != Action::kWholeModel && program_.units[static_cast<size_t>(unit)].between_halves_bytes > 0;
  }
  template <typename Body>
  void for_units(int64_t unit, const Body& body) const;
  void check_ranges() const;
  void check_sizes() const;
  void check_overlaps() const;
  void check_action();
  void check_compute(const Action& action);
  bool is_through(int64_t unit) const;
  void check_end() const;
  void demand(bool holds, const char* what) const;
  void demand_whole(int64_t unit) const;
  void demand_memory(Role role, int64_t unit, int64_t micro_batch = Action::kOnceAStep) const;
  void demand_gradients(int64_t unit) const;
  bool has_kept(Role role, int64_t unit) const;
  int64_t elements(Role role, int64_t unit) const;
  void reduce(const Action& action);
  void gather_sum(const Action& action);
  void wait(const Action& action);
  void unshard(int64_t unit);
  void update(int64_t unit);

  const StepProgram& program_;
  int64_t at_ = 0;
  std::map<std::pair<int64_t, int64_t>, int> forwards_, backwards_, weights_,
      taken_;                            ///< by unit and micro-batch
  std::map<int64_t, int64_t> reducing_;  ///< by unit: its reduction, which nothing has waited for
  std::map<int64_t, int64_t> summed_;  ///< by unit that was reduced: elements of which this rank has the sum
  std::set<int64_t> updated_;
  std::set<int64_t> gathered_;  ///< units whose parameters were, and are not freed yet
  std::set<int64_t> stale_;     ///< units of whose whole parameters this rank has updated a part alone
};

bool Verifier::has(Role role, int64_t unit, int64_t micro_batch) const {
  return std::ranges::any_of(program_.buffers, [&](const Buffer& buffer) {
    return buffer.role == role && buffer.unit == unit && buffer.micro_batch == micro_batch &&
           buffer.has_memory_at(at_);
  });
}

template <typename Body>
void Verifier::for_units(int64_t unit, const Body& body) const {
  if (unit != Action::kWholeModel) return body(unit);
  for (int64_t each = 0; each < std::ssize(program_.units); ++each) body(each);
}

void Verifier::demand(bool holds, const char* what) const {
  if (holds) return;
  const Action& action = program_.actions[static_cast<size_t>(at_)];
  throw LogicError("[plan.step_program] action {}, {} of {}{}: {}", at_, action.kind, name_of(action.unit),
                   action.micro_batch < 0 ? "" : fmt::format(" in micro-batch {}", action.micro_batch), what);
}

void Verifier::demand_memory(Role role, int64_t unit, int64_t micro_batch) const {
  if (has(role, unit, micro_batch)) return;
  demand(false, fmt::format("the {} of {} have no memory here", role, name_of(unit)).c_str());
}

void Verifier::demand_gradients(int64_t unit) const {
  if (!has(Role::kSum, unit)) demand_memory(Role::kGradients, unit);
}

void Verifier::demand_whole(int64_t unit) const {
  demand_memory(Role::kParameters, unit);
  const bool whole = has_kept(Role::kParameters, unit) || gathered_.contains(unit);
  if (whole && !stale_.contains(unit)) return;
  demand(false, fmt::format("the parameters of {} have not been gathered", name_of(unit)).c_str());
}

bool Verifier::has_kept(Role role, int64_t unit) const {
  return std::ranges::any_of(program_.buffers, [&](const Buffer& buffer) {
    return buffer.role == role && buffer.unit == unit && buffer.is_kept();
  });
}

/// fp32 numbers in the buffer of a role that has memory now.
int64_t Verifier::elements(Role role, int64_t unit) const {
  const auto found = std::ranges::find_if(program_.buffers, [&](const Buffer& buffer) {
    return buffer.role == role && buffer.unit == unit && buffer.has_memory_at(at_);
  });
  return found == program_.buffers.end() ? 0 : found->bytes / kFp32Bytes;
}

void Verifier::check_ranges() const {
  const auto count = std::ssize(program_.actions), units = std::ssize(program_.units);
  int64_t end = 0;
  for (const Pass& pass : program_.passes) {
    if (pass.begin != end || pass.end < pass.begin) {
      throw LogicError(
          "[plan.step_program] a {} pass covers actions {} to {}, but the previous one ends at {}", pass.kind,
          pass.begin, pass.end, end);
    }
    end = pass.end;
  }
  if (end != count)
    throw LogicError("[plan.step_program] the passes cover only {} of {} actions", end, count);
  const auto is_action = [&](int64_t at) { return at >= 0 && at < count; };
  for (const Buffer& buffer : program_.buffers) {
    const bool inside = buffer.is_kept() || (is_action(buffer.from) && is_action(buffer.to));
    if (inside && buffer.unit >= 0 && buffer.unit < units) continue;
    throw LogicError(
        "[plan.step_program] {} of unit {} have memory from {} to {}, but there are {} actions and {} units",
        buffer.role, buffer.unit, buffer.from, buffer.to, count, units);
  }
  for (const Action& action : program_.actions) {
    if (action.unit >= Action::kWholeModel && action.unit < units) continue;
    throw LogicError("[plan.step_program] {} of unit {}, but there are {} units", action.kind, action.unit,
                     units);
  }
}

void Verifier::check_sizes() const {
  if (has_countable_bytes(program_)) return;
  throw LogicError("[plan.step_program] the bytes of its buffers or transfers exceed 64 bits");
}

/// No two buffers of a unit hold the same at the same time.
void Verifier::check_overlaps() const {
  std::map<std::tuple<Role, int64_t, int64_t>, std::vector<const Buffer*>> alike;
  for (const Buffer& buffer : program_.buffers) {
    if (buffer.role != Role::kBoundary)
      alike[{buffer.role, buffer.unit, buffer.micro_batch}].push_back(&buffer);
  }
  const auto overlap = [](const Buffer& a, const Buffer& b) {
    return a.is_kept() || b.is_kept() || a.has_memory_at(b.from) || b.has_memory_at(a.from);
  };
  for (const auto& [key, buffers] : alike) {
    for (size_t i = 1; i < buffers.size(); ++i) {
      const Buffer& buffer = *buffers[i];
      const auto end = buffers.begin() + static_cast<int64_t>(i);
      const auto other = std::find_if(buffers.begin(), end,
                                      [&](const Buffer* earlier) { return overlap(*earlier, buffer); });
      if (other == end) continue;
      throw LogicError(
          "[plan.step_program] the {} of {} have two buffers at the same time, of {} and {} bytes; leave one",
          buffer.role, name_of(buffer.unit), (*other)->bytes, buffer.bytes);
    }
  }
}

void Verifier::check_compute(const Action& action) {
  const int64_t unit = action.unit, micro_batch = action.micro_batch;
  const std::pair key{unit, micro_batch};
  if (action.kind != ActionKind::kBackwardWeight) for_units(unit, [&](int64_t each) { demand_whole(each); });
  if (action.kind == ActionKind::kForward) {
    ++forwards_[key];
    if (knows_activations(unit) && micro_batch >= 0) demand_memory(Role::kActivations, unit, micro_batch);
    return;
  }
  if (action.kind != ActionKind::kBackwardWeight) {
    demand(forwards_[key] > 0, "its forward pass has not run");
    if (knows_activations(unit) && backwards_[key] == 0) demand_memory(Role::kActivations, unit, micro_batch);
    ++backwards_[key];
  } else {
    demand(backwards_[key] > 0, "its backward_input has not run");
    if (keeps_between_halves(unit)) demand_memory(Role::kActivations, unit, micro_batch);
  }
  if (action.kind == ActionKind::kBackwardInput) return;
  demand(action.kind == ActionKind::kBackward || weights_[key] == 0, "it occurs twice");
  for_units(unit, [&](int64_t each) {
    demand(!reducing_.contains(each), "its gradients are still being reduced, and nothing waits for that");
  });
  ++weights_[key];
  for_units(unit, [&](int64_t each) {
    if (program_.units[static_cast<size_t>(each)].trainable) demand_gradients(each);
  });
}

/// Whether every forward pass of a unit had its backward pass.
bool Verifier::is_through(int64_t unit) const {
  bool any = false;
  for (const auto& [key, count] : forwards_) {
    if (key.first != unit) continue;
    any = true;
    if (!weights_.contains(key)) return false;
  }
  return any;
}

/// Behind an all-to-all each rank has the sum of a part, which an all-gather makes whole.
int64_t summed_by(const Action& action, int64_t elements, int64_t whole) {
  for (const Transfer& transfer : action.transfers_along(Along::kData)) {
    const int64_t ranks = std::max<int64_t>(transfer.ranks, 1);
    if (transfer.collective == Collective::kAllToAll || transfer.collective == Collective::kReduceScatter)
      elements /= ranks;
    if (transfer.collective == Collective::kAllGather)
      elements = elements > whole / ranks ? whole : elements * ranks;
  }
  return elements;
}

void Verifier::reduce(const Action& action) {
  demand_memory(Role::kReduced, action.unit);
  const int64_t whole = program_.units[static_cast<size_t>(action.unit)].numel;
  summed_[action.unit] = summed_by(action, whole, whole);
  demand(reducing_.emplace(action.unit, at_).second, "nothing has waited for its last reduction");
}

/// A reduction reads gradients until computation has waited for it.
void Verifier::wait(const Action& action) {
  const auto found = reducing_.find(action.unit);
  if (found == reducing_.end() || found->second != action.awaits) {
    demand(false, fmt::format("it waits for action {}, which is no reduction of {} under way", action.awaits,
                              name_of(action.unit))
                      .c_str());
  }
  demand_gradients(action.unit);
  reducing_.erase(found);
}

void Verifier::gather_sum(const Action& action) {
  const auto summed = summed_.find(action.unit);
  demand(summed != summed_.end(), "it has not been reduced");
  const int64_t whole = program_.units[static_cast<size_t>(action.unit)].numel;
  summed->second = summed_by(action, summed->second, whole);
}

void Verifier::unshard(int64_t unit) {
  demand_memory(Role::kParameters, unit);
  if (!has_kept(Role::kParameters, unit)) demand_memory(Role::kShard, unit);
  gathered_.insert(unit);
  stale_.erase(unit);
}

/// The optimizer changes as many elements of a unit as the reduced gradient has.
void Verifier::update(int64_t unit) {
  demand(unit != Action::kWholeModel, "units are updated one by one");
  const ProgramUnit& updated = program_.units[static_cast<size_t>(unit)];
  const auto summed = summed_.find(unit);
  demand(!updated.trainable || summed != summed_.end(), "its gradients have not been reduced");
  demand(updated_.insert(unit).second, "it occurs twice");
  demand_memory(Role::kReduced, unit);
  if (!updated.trainable) return;
  for (const Role role : {Role::kMaster, Role::kMoments}) {
    if (!has_kept(role, unit))
      demand(false, fmt::format("the {} of {} are not kept", role, updated.name).c_str());
  }
  const int64_t changed = elements(Role::kReduced, unit), master = elements(Role::kMaster, unit);
  if (summed->second != changed || master != changed) {
    demand(false, fmt::format("it updates {} of the {} elements of {}, but this rank has the sum of {} and "
                              "masters of {}",
                              changed, updated.numel, updated.name, summed->second, master)
                      .c_str());
  }
  const bool holds_whole = has_kept(Role::kParameters, unit) || gathered_.contains(unit);
  if (changed < updated.numel && holds_whole) stale_.insert(unit);
}

void Verifier::check_action() {
  const Action& action = program_.actions[static_cast<size_t>(at_)];
  const int64_t unit = action.unit;
  if (action.computes()) return check_compute(action);
  switch (action.kind) {
    case ActionKind::kAccumulate:
    case ActionKind::kReduce: {
      const std::pair key{unit, action.micro_batch};
      demand(weights_[key] > 0 || weights_[{Action::kWholeModel, action.micro_batch}] > 0 ||
                 (action.micro_batch == Action::kOnceAStep && is_through(unit)),
             "its gradients are not complete");
      demand(++taken_[key] == 1, "it occurs twice");
      demand_gradients(unit);
      if (action.kind == ActionKind::kAccumulate) return;
      return reduce(action);
    }
    case ActionKind::kGatherSum:
      return gather_sum(action);
    case ActionKind::kWait:
      return wait(action);
    case ActionKind::kUpdate:
      return update(unit);
    case ActionKind::kUnshard:
      return unshard(unit);
    case ActionKind::kReshard:
      gathered_.erase(unit);
      if (!has_kept(Role::kParameters, unit)) stale_.erase(unit);
      return demand_memory(Role::kParameters, unit);
    case ActionKind::kSend:
      return demand(forwards_[{unit, action.micro_batch}] > 0, "it has not computed anything to send");
    default:
      return;
  }
}

void Verifier::check_end() const {
  if (!reducing_.empty()) {
    const auto& [unit, action] = *reducing_.begin();
    throw LogicError("[plan.step_program] nothing waits for action {}, the reduction of {}", action,
                     name_of(unit));
  }
  if (stale_.empty() || updated_.empty()) return;
  throw LogicError(
      "[plan.step_program] this rank updates a part of {}, and nothing unshards it afterwards: the next "
      "step would begin with parameters that other ranks have changed meanwhile",
      name_of(*stale_.begin()));
}

void Verifier::run() {
  check_ranges();
  check_sizes();
  check_overlaps();
  for (at_ = 0; at_ < std::ssize(program_.actions); ++at_) check_action();
  check_end();
  check_step_laws(program_);
}

}  // namespace

void verify(const StepProgram& program) {
  Verifier(program).run();
}

namespace {

/// Whether the communication of `action` can leave its pass. Scales of FP8 weights change from step to step.
bool can_leave(const StepProgram& program, const Pass& pass, const Action& action) {
  int64_t last = 0;
  for (const Pass& other : program.passes) last = std::max(last, other.micro_batch);
  const bool reduces = action.kind == ActionKind::kReduce || action.kind == ActionKind::kGatherSum;
  if (reduces) return pass.kind == Pass::Kind::kBackward && pass.micro_batch == last;
  return action.kind == ActionKind::kUnshard && !program.units[static_cast<size_t>(action.unit)].fp8;
}

}  // namespace

std::string recording_obstacle(const StepProgram& program) {
  bool communicates = false;
  for (const Pass& pass : program.passes) {
    if (pass.kind == Pass::Kind::kUpdate) continue;
    for (int64_t at = pass.begin; at < pass.end; ++at) {
      const Action& action = program.actions[static_cast<size_t>(at)];
      const std::string unit = action.unit < 0 ? "" : program.units[static_cast<size_t>(action.unit)].name;
      if (!action.transfers.empty()) {
        communicates = true;
        if (can_leave(program, pass, action)) continue;
        const Transfer& transfer = action.transfers.front();
        return fmt::format("{} ranks communicate within a pass ({} of {} for {} of micro-batch {})",
                           transfer.ranks, name(transfer.collective), unit, action.kind, pass.micro_batch);
      }
      if (communicates) continue;
      const bool moves =
          action.kind == ActionKind::kReduce &&
          std::ranges::none_of(program.buffers, [&](const Buffer& buffer) {
            return buffer.role == Role::kReduced && buffer.unit == action.unit && buffer.part_of;
          });
      if (moves) return fmt::format("gradients are copied within a pass ({} for reduce)", unit);
    }
  }
  for (const Buffer& buffer : program.buffers) {
    const bool comes = buffer.role == Role::kParameters || buffer.role == Role::kGradients;
    if (!communicates && !buffer.is_kept() && comes) {
      return fmt::format("the {} of {} are allocated within a pass", buffer.role,
                         program.units[static_cast<size_t>(buffer.unit)].name);
    }
  }
  return {};
}

}  // namespace trireme::plan
