#include "trireme/plan/stage_program.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using Kind = StageAction::Kind;

Pass::Kind kind_of(Kind kind) {
  switch (kind) {
    case Kind::kForward:
      return Pass::Kind::kForward;
    case Kind::kBackward:
      return Pass::Kind::kBackward;
    case Kind::kBackwardInput:
      return Pass::Kind::kBackwardInput;
    case Kind::kBackwardWeight:
      return Pass::Kind::kBackwardWeight;
    case Kind::kSend:
    case Kind::kPost:
    case Kind::kTake:
      break;
  }
  throw LogicError("[plan.stage_program] action {} is not a pass", static_cast<int>(kind));
}

/// A stage's own program, of which passes are taken one after the other.
struct Part {
  ProgramStage stage;
  StepProgram program;
  size_t next = 0;                  ///< of its passes
  std::vector<int64_t> place = {};  ///< of its actions in the whole
  int64_t first_unit = 0;           ///< in the whole
};

class Merger {
 public:
  Merger(const Schedule& schedule, const StageProgram& actions, const std::vector<ProgramStage>& stages,
         const EngineSetting& setting, const MessageBytes& bytes)
      : schedule_(schedule), actions_(actions), bytes_(bytes) {
    held_ = schedule.placement == Placement::kTwoWays;
    for (const ProgramStage& stage : stages) {
      Part part{.stage = stage, .program = program_of(stage, setting)};
      part.first_unit = std::ssize(whole_.units);
      whole_.units.insert(whole_.units.end(), stage.units.begin(), stage.units.end());
      parts_.push_back(std::move(part));
    }
  }

  StepProgram run() {
    if (held_) take_pass_of_each();
    for (const StageAction& action : actions_) {
      if (action.kind == Kind::kPost) continue;  // does nothing by itself
      action.peer < 0 ? take_pass(part_of(action.stage)) : transfer(action);
    }
    // Reductions that come after all passes, then updates, each in the order of stages.
    for (Part& part : parts_) {
      if (pass_of(part).kind == Pass::Kind::kReduce) take_pass(part);
    }
    if (held_) take_pass_of_each();
    take_pass_of_each();
    for (const Part& part : parts_) take_buffers(part);
    add_receive_buffers();
    return std::move(whole_);
  }

 private:
  StepProgram program_of(const ProgramStage& stage, const EngineSetting& setting) const {
    const auto reducing = reducing_micro_batch(schedule_, actions_, stage.index, stage.tied);
    std::vector<EnginePass> passes;
    for (const StageAction& action : actions_) {
      if (action.peer >= 0 || action.stage != stage.index) continue;
      passes.push_back({kind_of(action.kind), action.micro_batch,
                        action.kind == Kind::kBackward && reducing == action.micro_batch});
    }
    if (!reducing) passes.push_back({.kind = Pass::Kind::kReduce});
    return step_program(stage.units, setting, declared_order(stage.units, UseFrom::kRunUnit), passes, held_);
  }

  Part& part_of(int64_t stage) {
    const auto found =
        std::ranges::find_if(parts_, [&](const Part& part) { return part.stage.index == stage; });
    TRIREME_CHECK(found != parts_.end(), "[plan.stage_program] stage {} does not belong to this rank", stage);
    return *found;
  }
  static const Pass& pass_of(const Part& part) { return part.program.passes.at(part.next); }

  void take_pass_of_each() {
    for (Part& part : parts_) take_pass(part);
  }

  void take_pass(Part& part) {
    Pass pass = pass_of(part);
    ++part.next;
    const int64_t begin = std::ssize(whole_.actions);
    for (Action& message : arriving_) whole_.actions.push_back(std::move(message));
    arriving_.clear();
    for (int64_t at = pass.begin; at < pass.end; ++at) {
      Action action = part.program.actions[static_cast<size_t>(at)];
      if (action.unit != Action::kWholeModel) action.unit += part.first_unit;
      if (action.awaits >= 0) action.awaits = part.place.at(static_cast<size_t>(action.awaits));
      part.place.push_back(std::ssize(whole_.actions));
      whole_.actions.push_back(std::move(action));
    }
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

  /// What arrives belongs to the pass that follows, what leaves to the one before.
  void transfer(const StageAction& action) {
    const bool sends = action.kind == Kind::kSend;
    const StageEnd place = place_of(action.message, action.stage, sends);
    const Part& part = part_of(place.stage);
    const int64_t unit = part.first_unit + (place.at_end ? std::ssize(part.stage.units) - 1 : 0);
    Action message{.kind = sends ? ActionKind::kSend : ActionKind::kRecv,
                   .unit = unit,
                   .micro_batch = action.micro_batch,
                   .lane = sends ? Lane::kSend : Lane::kRecv,
                   .peer = action.peer};
    if (!sends) return arriving_.push_back(std::move(message));
    message.transfers = {{Collective::kSend, 2, bytes_.of(action.message, action.stage)}};
    whole_.actions.push_back(std::move(message));
    ++whole_.passes.back().end;
  }

  void take_buffers(const Part& part) {
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
      const Part& part = part_of(place_of(message, stage, /*sends=*/false).stage);
      for (int64_t i = 0; i < count; ++i)
        whole_.buffers.push_back(
            {.role = Role::kBoundary, .unit = part.first_unit, .bytes = bytes_.of(message, stage)});
    }
  }

  const Schedule& schedule_;
  const StageProgram& actions_;
  MessageBytes bytes_;
  bool held_;
  std::vector<Part> parts_;
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

std::optional<int64_t> reducing_micro_batch(const Schedule& schedule, const StageProgram& actions,
                                            int64_t stage, bool tied) {
  if (tied || schedule.placement == Placement::kTwoWays) return std::nullopt;
  std::optional<int64_t> last;
  for (const StageAction& action : actions) {
    if (action.peer >= 0 || action.stage != stage) continue;
    if (action.kind == Kind::kBackwardInput) return std::nullopt;
    if (action.kind == Kind::kBackward) last = action.micro_batch;
  }
  return last;
}

int64_t MessageBytes::of(Message message, int64_t stage) const {
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

StepProgram stage_program(const Schedule& schedule, const StageProgram& actions,
                          const std::vector<ProgramStage>& stages, const EngineSetting& setting,
                          const MessageBytes& bytes) {
  return Merger(schedule, actions, stages, setting, bytes).run();
}

}  // namespace trireme::plan
