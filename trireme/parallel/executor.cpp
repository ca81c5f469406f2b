#include "trireme/parallel/executor.h"

#include <algorithm>
#include <utility>

#include "trireme/base/heartbeat.h"
#include "trireme/kernels/range.h"

namespace trireme::parallel {

using plan::Action;
using plan::ActionKind;
using plan::UseFrom;
using Event = plan::UseOrder::Event;

Executor::Executor(const Units& units, const plan::EngineSetting& setting)
    : units_(units), setting_(setting), states_(units.size(), State::kIdle), complete_(units.size(), false) {
  setting_.accumulation = 2;  // the first stands for all but the last
  write_programs();
}

/// Until ranks have agreed on another order, the units that come last in a forward pass are reduced first.
void Executor::write_programs() {
  std::vector<plan::ProgramUnit> units;
  for (const auto& unit : units_)
    units.push_back({.name = unit->name(),
                     .numel = unit->layout().numel(),
                     .trainable = unit->trainable(),
                     .fp8 = unit->fp8()});
  if (!recorded_ && setting_.use_from != UseFrom::kOperators) {
    const plan::UseOrder declared = declared_order(units, setting_.use_from);
    order_.forward = declared.forward;
    order_.backward = declared.backward;
  }
  plan::UseOrder order = order_;
  if (order.reductions.empty()) {
    for (size_t unit = units.size(); unit-- > 0;) order.reductions.push_back(static_cast<int64_t>(unit));
    if (setting_.use_from == UseFrom::kBuckets) std::ranges::reverse(order.reductions);
  }
  std::erase_if(order.reductions, [&](int64_t unit) { return !units[static_cast<size_t>(unit)].trainable; });
  training_ = plan::step_program(units, setting_, order);
  inference_ = plan::inference_program(units, setting_, order);
  update_order_.clear();
  for (const Action& action : training_.actions) {
    if (action.kind == ActionKind::kUpdate) update_order_.push_back(static_cast<size_t>(action.unit));
  }
  end_pass();
}

void Executor::end_pass() {
  late_.clear();
  program_ = nullptr;
  next_ = end_ = last_waits_ = 0;
}

void Executor::begin(const plan::StepProgram& program, plan::Pass::Kind kind, int64_t micro_batch) {
  const auto pass = std::ranges::find_if(program.passes, [&](const plan::Pass& candidate) {
    return candidate.kind == kind && candidate.micro_batch == micro_batch;
  });
  program_ = &program;
  next_ = static_cast<size_t>(pass->begin);
  end_ = last_waits_ = static_cast<size_t>(pass->end);
  while (last_waits_ > next_ && program.actions[last_waits_ - 1].kind == ActionKind::kWait) --last_waits_;
  std::ranges::fill(states_, State::kIdle);
}

void Executor::begin_forward(bool trains) {
  trains_ = trains;
  in_backward_ = false;
  begin(trains ? training_ : inference_, plan::Pass::Kind::kForward, trains ? 0 : Action::kOnceAStep);
  if (trains) seen_.forward.clear();
  if (setting_.use_from == UseFrom::kRunUnit) enter_forward(0);
  if (setting_.use_from != UseFrom::kBuckets) return;
  for (const auto& unit : units_) unit->unshard();
}

void Executor::enter_forward(size_t index) {
  beat();
  if (states_[index] == State::kIdle) {
    if (trains_) seen_.forward.push_back(static_cast<int64_t>(index));
    states_[index] = advance_to(ActionKind::kForward, index) ? State::kInUse : State::kOutOfTurn;
    if (observer_ && !unit(index).is_whole()) observer_(true, index);
  }
  unit(index).unshard();
}

void Executor::leave_forward(size_t index) {
  const State state = states_[index];
  if (!is_root(index)) states_[index] = State::kIdle;
  if (state == State::kOutOfTurn && !is_root(index)) reshard(index);
  advance();
}

void Executor::begin_backward(bool last) {
  last_ = last;
  trains_ = in_backward_ = true;
  begin(training_, plan::Pass::Kind::kBackward, last ? 1 : 0);
  seen_.backward.clear();
  complete_.assign(units_.size(), false);
  for (const auto& unit : units_) unit->begin_backward(last);
  if (last && units_.front()->puts_reduction_off()) put_off_.clear();
  if (setting_.use_from == UseFrom::kRunUnit && !unit(0).is_whole())
    unit(0).unshard();  // the end of a hold has freed it since forward
  prepare_gradients_ahead();
}

/// Our autograd functions write gradients into memory that must be lent before; blocks get theirs when
/// backward reaches them.
void Executor::prepare_gradients_ahead() {
  if (setting_.use_from == UseFrom::kBuckets) {
    for (const auto& unit : units_) unit->prepare_gradients();
  } else if (setting_.use_from == UseFrom::kRunUnit) {
    unit(0).prepare_gradients();
  }
}

void Executor::record(Event::Kind kind, size_t unit) {
  seen_.backward.push_back({kind, static_cast<int64_t>(unit)});
}

void Executor::enter_backward(size_t index) {
  beat();
  if (states_[index] == State::kIdle) {
    record(Event::Kind::kBegin, index);
    states_[index] = advance_to(ActionKind::kBackward, index) ? State::kInUse : State::kOutOfTurn;
  }
  unit(index).unshard();
  if (setting_.use_from == UseFrom::kRunUnit) unit(index).prepare_gradients();
}

void Executor::leave_backward(size_t index) {
  if (is_root(index)) return;
  record(Event::Kind::kEnd, index);
  const State state = std::exchange(states_[index], State::kIdle);
  if (state == State::kOutOfTurn) reshard(index);
  advance();
}

void Executor::complete(size_t index) {
  record(Event::Kind::kComplete, index);
  complete_[index] = true;
  issue_late();
  advance();
  // The unit's gradients may need none of its parameters; then nothing has announced its backward pass.
  const bool unannounced = next_ < end_ && program_->actions[next_].kind == ActionKind::kBackward &&
                           program_->actions[next_].unit == static_cast<int64_t>(index);
  if (!unannounced) return;
  ++next_;
  advance();
}

/// Issues what the program lists before the next action of that kind on the unit, which is about to run.
/// Returns false when the program does not list such an action any more.
bool Executor::advance_to(ActionKind kind, size_t index) {
  for (size_t at = next_; at < end_; ++at) {
    const Action& action = program_->actions[at];
    if (action.kind != kind || action.unit != static_cast<int64_t>(index)) continue;
    while (next_ < at) pass(program_->actions[next_++]);
    ++next_;
    return true;
  }
  return false;
}

/// Issues what may be issued before the next unit computes. The waits that end a pass are left to
/// end_backward(): nothing computes behind them, and within a hook of autograd they would give memory back
/// before it is done.
void Executor::advance() {
  while (next_ < last_waits_ && is_due(program_->actions[next_])) issue(program_->actions[next_++]);
}

bool Executor::is_due(const Action& action) const {
  if (action.computes()) return action.unit == Action::kWholeModel;
  const auto index = static_cast<size_t>(action.unit);
  switch (action.kind) {
    case ActionKind::kReshard:
      return states_[index] == State::kIdle;
    case ActionKind::kAccumulate:
    case ActionKind::kReduce:
      return complete_[index] && late_.empty();
    case ActionKind::kGatherSum:
    case ActionKind::kWait:
      return late_.empty();
    default:
      return true;
  }
}

/// The module is past this action: if it is not due yet, it is done once it is due.
void Executor::pass(const Action& action) {
  if (action.computes()) return;
  if (is_due(action)) return issue(action);
  if (action.kind == ActionKind::kReshard) {
    states_[static_cast<size_t>(action.unit)] = State::kOutOfTurn;
  } else {
    late_.push_back(&action);
  }
}

void Executor::pass_rest() {
  while (next_ < end_) pass(program_->actions[next_++]);
}

void Executor::issue(const Action& action) {
  if (action.computes()) return;
  const auto index = static_cast<size_t>(action.unit);
  switch (action.kind) {
    case ActionKind::kUnshard: {
      if (observer_ && !unit(index).is_whole()) observer_(true, index);
      const kernels::TraceRange range("gather " + unit(index).name());
      return unit(index).start_unshard();
    }
    case ActionKind::kReshard:
      return reshard(index);
    case ActionKind::kAccumulate:
    case ActionKind::kReduce:
    case ActionKind::kGatherSum:
    case ActionKind::kWait:
      return issue_on_gradients(action);
    default:
      return;
  }
}

/// A recording holds what computes; the launch of it issues the rest (reduce_launched()).
void Executor::issue_on_gradients(const Action& action) {
  FlatUnit& unit = this->unit(static_cast<size_t>(action.unit));
  const bool put_off = last_ && unit.puts_reduction_off();
  if (put_off) put_off_.push_back(action);
  switch (action.kind) {
    case ActionKind::kGatherSum:
      return put_off ? void() : unit.gather_sum();
    case ActionKind::kWait:
      return put_off ? void() : unit.finish_reduce();
    default:
      return reduce(action);
  }
}

void Executor::reshard(size_t index) {
  if (holds_ > 0) return;
  if (observer_ && unit(index).is_whole()) observer_(false, index);
  trains_ && !in_backward_ ? unit(index).reshard_after_forward() : unit(index).reshard();
}

void Executor::issue_late() {
  const auto is_due_now = [this](const Action& action) {
    const bool takes = action.kind == ActionKind::kReduce || action.kind == ActionKind::kAccumulate;
    return !takes || complete_[static_cast<size_t>(action.unit)];
  };
  for (; !late_.empty() && is_due_now(*late_.front()); late_.pop_front()) issue_on_gradients(*late_.front());
}

void Executor::reduce(const Action& action) {
  FlatUnit& unit = this->unit(static_cast<size_t>(action.unit));
  const kernels::TraceRange range("reduce " + unit.name());
  if (action.kind == ActionKind::kReduce) {
    ++reductions_;
    unit.prepare_gradients();  // what took no part has gradients of zero
  }
  unit.start_reduce(last_);
}

void Executor::reduce_launched() {
  for (const Action& action : put_off_) {
    FlatUnit& unit = this->unit(static_cast<size_t>(action.unit));
    if (action.kind == ActionKind::kGatherSum) {
      unit.gather_sum();
    } else if (action.kind == ActionKind::kWait) {
      unit.finish_reduce();
    } else {
      const kernels::TraceRange range("reduce " + unit.name());
      unit.start_launched_reduce();
    }
  }
}

void Executor::end_backward() {
  complete_.assign(units_.size(), true);
  std::ranges::fill(states_, State::kIdle);
  issue_late();
  pass_rest();
  free_units();
  end_pass();
  const bool same = recorded_ && seen_.forward == order_.forward && seen_.backward == order_.backward;
  if (same) return;
  recorded_ = true;
  order_.forward = seen_.forward;
  order_.backward = seen_.backward;
  write_programs();
}

void Executor::end_without_units() {
  complete_.assign(units_.size(), true);
  while (next_ < end_) {
    const Action& action = program_->actions[next_++];
    if (action.kind != ActionKind::kUnshard && action.kind != ActionKind::kReshard) pass(action);
  }
  in_backward_ = false;
  end_pass();
}

void Executor::replay(bool last) {
  begin_forward(true);
  pass_rest();
  begin_backward(last);
  complete_.assign(units_.size(), true);
  while (next_ < end_) {
    const Action& action = program_->actions[next_++];
    const bool lends = action.kind == ActionKind::kBackward && setting_.use_from == UseFrom::kRunUnit;
    lends ? unit(static_cast<size_t>(action.unit)).prepare_gradients() : pass(action);
  }
  free_units();
  end_pass();
}

void Executor::abandon() {
  end_pass();
  for (const auto& unit : units_) unit->finish_reduce();
  free_units();
}

void Executor::free_units() {
  in_backward_ = true;
  for (size_t index = 1; index < units_.size(); ++index) reshard(index);
  in_backward_ = false;
}

std::vector<int64_t> Executor::completions() const {
  std::vector<int64_t> order;
  const auto append = [&](int64_t unit) {
    if (std::ranges::find(order, unit) == order.end()) order.push_back(unit);
  };
  for (const Event& event : seen_.backward) {
    if (event.kind == Event::Kind::kComplete) append(event.unit);
  }
  for (size_t unit = units_.size(); unit-- > 0;) append(static_cast<int64_t>(unit));
  return order;
}

void Executor::set_reductions(std::vector<int64_t> order) {
  order_.reductions = std::move(order);
  write_programs();
}

/// Ranks without data replay the order that they have recorded, so it must gather the same units as the order
/// of the other ranks.
void Executor::follow_freezing() {
  if (setting_.gathers()) recorded_ = false;
  write_programs();
}

void Executor::stay_in_place() {
  setting_.stays = true;
  write_programs();
}

void Executor::follow(bool gathers, size_t index) {
  gathers ? unit(index).start_unshard() : unit(index).reshard();
}

}  // namespace trireme::parallel
