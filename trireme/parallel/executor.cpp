#include "trireme/parallel/executor.h"

#include <algorithm>
#include <utility>

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
  program_ = nullptr;
  next_ = end_ = 0;
}

void Executor::begin(const plan::StepProgram& program, plan::Pass::Kind kind, int64_t micro_batch) {
  const auto pass = std::ranges::find_if(program.passes, [&](const plan::Pass& candidate) {
    return candidate.kind == kind && candidate.micro_batch == micro_batch;
  });
  program_ = &program;
  next_ = static_cast<size_t>(pass->begin);
  end_ = static_cast<size_t>(pass->end);
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
  late_.clear();
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
  reduce_late();
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

/// Issues what may be issued before the next unit computes.
void Executor::advance() {
  while (next_ < end_ && is_due(program_->actions[next_])) issue(program_->actions[next_++]);
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
      return late_.empty();
    default:
      return true;
  }
}

/// The module is past this action: if it is not due yet, it is done once it is due.
void Executor::pass(const Action& action) {
  if (action.computes()) return;
  if (is_due(action)) return issue(action);
  const auto index = static_cast<size_t>(action.unit);
  if (action.kind == ActionKind::kReshard) states_[index] = State::kOutOfTurn;
  if (action.kind == ActionKind::kReduce || action.kind == ActionKind::kAccumulate) late_.push_back(index);
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
      return reduce(index);
    case ActionKind::kGatherSum:
      return gather_sum(index);
    default:
      return;
  }
}

void Executor::reshard(size_t index) {
  if (holds_ > 0) return;
  if (observer_ && unit(index).is_whole()) observer_(false, index);
  trains_ && !in_backward_ ? unit(index).reshard_after_forward() : unit(index).reshard();
}

void Executor::reduce_late() {
  while (!late_.empty() && complete_[late_.front()]) {
    reduce(late_.front());
    if (last_ && setting_.gathers_sum()) gather_sum(late_.front());
    late_.pop_front();
  }
}

void Executor::reduce(size_t index) {
  FlatUnit& unit = this->unit(index);
  const kernels::TraceRange range("reduce " + unit.name());
  if (last_ || !setting_.reduces_once) {
    ++reductions_;
    unit.prepare_gradients();  // what took no part has gradients of zero
  }
  unit.start_reduce(last_);
  if (last_ && unit.puts_reduction_off()) return put_off_.push_back({index, /*gathers_sum=*/false});
  in_flight_.push_back(index);
  finish_reductions(setting_.beside ? static_cast<size_t>(plan::kReductionsInFlight) : 0);
}

void Executor::gather_sum(size_t index) {
  FlatUnit& unit = this->unit(index);
  unit.puts_reduction_off() ? put_off_.push_back({index, /*gathers_sum=*/true}) : unit.gather_sum();
}

void Executor::reduce_launched() {
  for (const auto& [index, gathers_sum] : put_off_) {
    if (gathers_sum) {
      unit(index).gather_sum();
      continue;
    }
    const kernels::TraceRange range("reduce " + unit(index).name());
    unit(index).start_launched_reduce();
    in_flight_.push_back(index);
  }
  finish_reductions(0);
}

/// The current stream waits for the reductions in flight, but for the last `left`.
void Executor::finish_reductions(size_t left) {
  while (in_flight_.size() > left) {
    unit(in_flight_.front()).finish_reduce();
    in_flight_.pop_front();
  }
}

void Executor::end_backward() {
  complete_.assign(units_.size(), true);
  std::ranges::fill(states_, State::kIdle);
  reduce_late();
  pass_rest();
  finish_reductions(0);
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
  finish_reductions(0);
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
  finish_reductions(0);
  free_units();
  end_pass();
}

void Executor::abandon() {
  end_pass();
  late_.clear();
  finish_reductions(0);
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
