#include "trireme/plan/stage_program.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// A stage's own program, of which passes are taken one after the other.
struct StageSteps {
  ProgramStage stage;
  StepProgram program;
  size_t next = 0;                  ///< of its passes
  std::vector<int64_t> place = {};  ///< of its actions in the whole
  int64_t first_unit = 0;           ///< in the whole
};

class Merger {
 public:
  Merger(const Schedule& schedule, const StageActions& actions, const std::vector<ProgramStage>& stages,
         const MessageBytes& bytes)
      : schedule_(schedule), actions_(actions), bytes_(bytes) {
    trains_ = std::ranges::any_of(
        actions, [](const Action& action) { return action.computes() && action.kind != Kind::kForward; });
    held_ = trains_ && schedule.placement == Placement::kTwoWays;
    for (const ProgramStage& stage : stages) {
      StageSteps part{.stage = stage, .program = program_of(stage)};
      part.first_unit = std::ssize(whole_.units);
      whole_.units.insert(whole_.units.end(), stage.units.begin(), stage.units.end());
      parts_.push_back(std::move(part));
    }
  }

  StepProgram run(const TiedElements& tied) {
    if (held_) take_pass_of_each();
    for (const Action& action : actions_)
      action.is_message() ? take_message(action) : take_pass(part_of(action.stage));
    if (trains_) sum_tied(tied);
    // Reductions that come after all passes, then updates, each in the order of stages.
    for (StageSteps& part : parts_) {
      if (trains_ && pass_of(part).kind == Pass::Kind::kReduce) take_pass(part);
    }
    if (held_) take_pass_of_each();
    if (trains_) take_pass_of_each();
    for (const StageSteps& part : parts_) take_buffers(part);
    add_receive_buffers();
    return std::move(whole_);
  }

 private:
  StepProgram program_of(const ProgramStage& stage) const {
    const auto reducing = reducing_micro_batch(schedule_, actions_, stage.index, stage.tied);
    std::vector<EnginePass> passes;
    for (const Action& action : actions_) {
      if (action.is_message() || action.stage != stage.index) continue;
      passes.push_back({action.kind, action.micro_batch,
                        action.kind == Kind::kBackward && reducing == action.micro_batch});
    }
    if (!reducing) passes.push_back({.kind = Kind::kReduce});
    return step_program(stage.units, stage.setting, stage.order, passes, held_);
  }

  StageSteps& part_of(int64_t stage) {
    const auto found =
        std::ranges::find_if(parts_, [&](const StageSteps& part) { return part.stage.index == stage; });
    TRIREME_CHECK(found != parts_.end(), "[plan.stage_program] stage {} does not belong to this rank", stage);
    return *found;
  }
  static const Pass& pass_of(const StageSteps& part) { return part.program.passes.at(part.next); }

  void take_pass_of_each() {
    for (StageSteps& part : parts_) take_pass(part);
  }

  void take_pass(StageSteps& part) {
    Pass pass = pass_of(part);
    ++part.next;
    const int64_t begin = std::ssize(whole_.actions);
    for (Action& message : arriving_) whole_.actions.push_back(std::move(message));
    arriving_.clear();
    bool computes = false;
    for (int64_t at = pass.begin; at < pass.end; ++at) {
      Action action = part.program.actions[static_cast<size_t>(at)];
      if (action.unit != Action::kWholeModel) action.unit += part.first_unit;
      if (action.awaits >= 0) action.awaits = part.place.at(static_cast<size_t>(action.awaits));
      action.stage = part.stage.index;
      computes = computes || action.computes();
      part.place.push_back(std::ssize(whole_.actions));
      whole_.actions.push_back(std::move(action));
    }
    if (const auto kind = computing(pass.kind); kind && !computes) {
      const int64_t unit = part.stage.units.empty() ? Action::kWholeModel : part.first_unit;
      whole_.actions.push_back(
          {.kind = *kind, .unit = unit, .micro_batch = pass.micro_batch, .stage = part.stage.index});
    }
    pass.stage = part.stage.index;
    pass.begin = begin;
    pass.end = std::ssize(whole_.actions);
    whole_.passes.push_back(pass);
  }

  /// Where a message leaves or arrives: at the end of a stage are its output and what comes back for it.
  struct StageEnd {
    int64_t stage;
    bool at_end;
  };
  StageEnd place_of(Message message, int64_t stage, bool sends) const {
    const int64_t last = schedule_.stages - 1;
    switch (message) {
      case Message::kActivation:
        return sends ? StageEnd{stage - 1, true} : StageEnd{stage, false};
      case Message::kGradient:
        return sends ? StageEnd{stage + 1, false} : StageEnd{stage, true};
      case Message::kHidden:
        return sends ? StageEnd{last, true} : StageEnd{stage, false};
      case Message::kPart:
        return sends ? StageEnd{stage, true} : StageEnd{last, true};
      case Message::kTotals:
        return sends ? StageEnd{last, true} : StageEnd{stage, true};
    }
    throw LogicError("[plan.stage_program] message {} has no place", static_cast<int>(message));
  }

  /// What arrives belongs to the pass that follows; what leaves, and buffers that are free again, to the one
  /// before.
  void take_message(Action message) {
    const bool sends = message.kind == Kind::kSend;
    const StageEnd place = place_of(message.message, message.stage, sends);
    const StageSteps& part = part_of(place.stage);
    message.lane = sends ? Lane::kSend : Lane::kRecv;
    if (const int64_t units = std::ssize(part.stage.units); units > 0)
      message.unit = part.first_unit + (place.at_end ? units - 1 : 0);
    if (sends) message.transfers = {{Collective::kSend, 2, bytes_.of(message.message, message.stage)}};
    if (message.kind == Kind::kRecv || whole_.passes.empty() || !arriving_.empty())
      return arriving_.push_back(std::move(message));
    whole_.actions.push_back(std::move(message));
    ++whole_.passes.back().end;
  }

  /// Bytes of an element of the gradients that a unit has behind all passes.
  int64_t gradient_bytes(int64_t unit) const {
    const auto behind = std::ranges::upper_bound(parts_, unit, {}, &StageSteps::first_unit);
    const StageSteps& part = *std::prev(behind);
    int64_t bytes = 0;
    for (const Buffer& buffer : part.program.buffers) {
      if (buffer.unit + part.first_unit != unit) continue;
      if (buffer.role == Role::kSum) return kFp32Bytes;
      if (buffer.role == Role::kGradients)
        bytes = buffer.bytes / whole_.units[static_cast<size_t>(unit)].numel;
    }
    return bytes;
  }

  void sum_tied(const TiedElements& tied) {
    const auto unit = std::ranges::find_if(whole_.units, &ProgramUnit::tied);
    if (unit == whole_.units.end()) return;
    const int64_t stage = parts_.front().stage.index;
    Action action{.kind = Kind::kSumTied, .stage = stage};
    for (const int64_t elements : tied) {
      const int64_t bytes = elements * gradient_bytes(unit - whole_.units.begin());
      action.transfers.push_back({Collective::kAllReduce, 2, wire_bytes(Collective::kAllReduce, bytes, 2)});
    }
    const int64_t at = std::ssize(whole_.actions);
    whole_.actions.push_back(std::move(action));
    whole_.passes.push_back({.kind = Pass::Kind::kSumTied, .begin = at, .end = at + 1, .stage = stage});
  }

  void take_buffers(const StageSteps& part) {
    for (Buffer buffer : part.program.buffers) {
      buffer.unit += part.first_unit;
      if (!buffer.is_kept()) {
        buffer.from = part.place.at(static_cast<size_t>(buffer.from));
        buffer.to = part.place.at(static_cast<size_t>(buffer.to));
      }
      whole_.buffers.push_back(buffer);
    }
  }

  void add_receive_buffers() {
    for (const auto& [pool, count] : receive_buffers(actions_)) {
      const auto& [stage, message] = pool;
      const StageSteps& part = part_of(place_of(message, stage, /*sends=*/false).stage);
      if (part.stage.units.empty()) continue;
      for (int64_t i = 0; i < count; ++i)
        whole_.buffers.push_back(
            {.role = Role::kBoundary, .unit = part.first_unit, .bytes = bytes_.of(message, stage)});
    }
  }

  const Schedule& schedule_;
  const StageActions& actions_;
  MessageBytes bytes_;
  bool trains_ = false, held_ = false;
  std::vector<StageSteps> parts_;
  std::vector<Action> arriving_;
  StepProgram whole_;
};

}  // namespace

EngineSetting setting_in_stages(EngineSetting setting, const Schedule& schedule) {
  if (schedule.placement != Placement::kTwoWays) return setting;
  MeshShape::Coordinates sizes{};
  for (size_t axis = 0; axis < kAxes; ++axis) sizes[axis] = setting.mesh.size(static_cast<Axis>(axis));
  sizes[static_cast<size_t>(Axis::kPp)] /= 2;
  sizes[static_cast<size_t>(Axis::kDpReplicate)] *= 2;
  setting.mesh = MeshShape(sizes);
  return setting;
}

std::optional<int64_t> reducing_micro_batch(const Schedule& schedule, const StageActions& actions,
                                            int64_t stage, bool tied) {
  if (tied || schedule.placement == Placement::kTwoWays) return std::nullopt;
  std::optional<int64_t> last;
  for (const Action& action : actions) {
    if (action.is_message() || action.stage != stage) continue;
    if (action.kind == Kind::kBackwardInput) return std::nullopt;
    if (action.kind == Kind::kBackward) last = action.micro_batch;
  }
  return last;
}

int64_t MessageBytes::of(Message message, int64_t stage) const {
  if (boundaries.empty()) return 0;
  switch (message) {
    case Message::kActivation:
      return boundaries.at(static_cast<size_t>(stage) - 1);
    case Message::kGradient:
      return boundaries.at(static_cast<size_t>(stage));
    case Message::kHidden:
      return boundaries.back();
    case Message::kPart:
      return part;
    case Message::kTotals:
      return totals;
  }
  throw LogicError("[plan.stage_program] message {} has no size", static_cast<int>(message));
}

StepProgram stage_program(const Schedule& schedule, const StageActions& actions,
                          const std::vector<ProgramStage>& stages, const MessageBytes& bytes,
                          const TiedElements& tied) {
  return Merger(schedule, actions, stages, bytes).run(tied);
}

}  // namespace trireme::plan
