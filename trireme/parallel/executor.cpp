#include "trireme/parallel/executor.h"

#include <algorithm>
#include <utility>

#include "trireme/base/heartbeat.h"
#include "trireme/kernels/range.h"

namespace trireme::parallel {

using plan::Action;
using plan::ActionKind;
using plan::Pass;
using plan::UseFrom;
using Event = plan::UseOrder::Event;

Executor::Executor(const Units& units, UseFrom use_from)
    : units_(units),
      use_from_(use_from),
      states_(units.size(), State::kIdle),
      complete_(units.size(), false) {}

void Executor::end_pass() {
  late_.clear();
  turn_ = {};
  next_ = end_ = last_waits_ = 0;
}

void Executor::begin(const Turn& turn) {
  late_.clear();
  turn_ = turn;
  next_ = static_cast<size_t>(turn.pass->begin);
  end_ = static_cast<size_t>(turn.pass->end);
  while (end_ > next_ && action(end_ - 1).is_message()) --end_;  // the pipeline sends them
  last_waits_ = end_;
  while (last_waits_ > next_ && action(last_waits_ - 1).kind == ActionKind::kWait) --last_waits_;
  std::ranges::fill(states_, State::kIdle);
}

/// Whether the backward pass under way goes through the module.
bool Executor::uses_parameters() const {
  return turn_.pass->kind == Pass::Kind::kBackward || turn_.pass->kind == Pass::Kind::kBackwardInput;
}

ActionKind Executor::backward_kind() const {
  return turn_.pass->kind == Pass::Kind::kBackwardInput ? ActionKind::kBackwardInput : ActionKind::kBackward;
}

void Executor::begin_forward(const Turn& turn, bool trains) {
  trains_ = trains;
  in_backward_ = false;
  begin(turn);
  if (trains) seen_.forward.clear();
  if (use_from_ == UseFrom::kRunUnit) enter_forward(0);
  if (use_from_ != UseFrom::kBuckets) return;
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

void Executor::begin_backward(const Turn& turn, bool last) {
  last_ = last;
  trains_ = in_backward_ = true;
  begin(turn);
  seen_.backward.clear();
  complete_.assign(units_.size(), false);
  for (const auto& unit : units_) unit->begin_backward(last);
  if (last && units_.front()->puts_reduction_off()) put_off_.clear();
  if (uses_parameters() && use_from_ == UseFrom::kRunUnit && !unit(0).is_whole())
    unit(0).unshard();  // the end of a hold has freed it since forward
  prepare_gradients_ahead();
}

/// Our autograd functions write gradients into memory that must be lent before; blocks get theirs when
/// backward reaches them.
void Executor::prepare_gradients_ahead() {
  if (use_from_ == UseFrom::kBuckets) {
    for (const auto& unit : units_) unit->prepare_gradients();
  } else if (use_from_ == UseFrom::kRunUnit) {
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
    states_[index] = advance_to(backward_kind(), index) ? State::kInUse : State::kOutOfTurn;
  }
  unit(index).unshard();
  if (use_from_ == UseFrom::kRunUnit) unit(index).prepare_gradients();
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
  const bool unannounced =
      next_ < end_ && action(next_).kind == backward_kind() && unit_of(action(next_)) == index;
  if (!unannounced) return;
  ++next_;
  advance();
}

/// Issues what the program lists before the next action of that kind on the unit, which is about to run.
/// Returns false when the program does not list such an action any more.
bool Executor::advance_to(ActionKind kind, size_t index) {
  for (size_t at = next_; at < end_; ++at) {
    if (action(at).kind != kind || unit_of(action(at)) != index) continue;
    while (next_ < at) pass(action(next_++));
    ++next_;
    return true;
  }
  return false;
}

/// Issues what may be issued before the next unit computes. The waits that end a pass are left to
/// end_backward(): nothing computes behind them, and within a hook of autograd they would give memory back
/// before it is done.
void Executor::advance() {
  while (next_ < last_waits_ && is_due(action(next_))) issue(action(next_++));
}

bool Executor::is_due(const Action& action) const {
  if (action.computes()) return action.unit == Action::kWholeModel;
  const size_t index = unit_of(action);
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
    states_[unit_of(action)] = State::kOutOfTurn;
  } else {
    late_.push_back(&action);
  }
}

void Executor::pass_rest() {
  while (next_ < end_) pass(action(next_++));
}

void Executor::issue(const Action& action) {
  if (action.computes()) return;
  const size_t index = unit_of(action);
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
  FlatUnit& unit = this->unit(unit_of(action));
  const bool put_off = last_ && unit.puts_reduction_off();
  if (put_off) put_off_.emplace_back(action).unit = static_cast<int64_t>(unit_of(action));
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
    return !takes || complete_[unit_of(action)];
  };
  for (; !late_.empty() && is_due_now(*late_.front()); late_.pop_front()) issue_on_gradients(*late_.front());
}

void Executor::reduce(const Action& action) {
  FlatUnit& unit = this->unit(unit_of(action));
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
  if (uses_parameters()) free_units();
  in_backward_ = false;
  end_pass();
}

void Executor::replay(const Turn& forward, const Turn& backward, bool last) {
  begin_forward(forward, /*trains=*/true);
  pass_rest();
  begin_backward(backward, last);
  complete_.assign(units_.size(), true);
  while (next_ < end_) {
    const Action& action = this->action(next_++);
    const bool lends = action.kind == ActionKind::kBackward && use_from_ == UseFrom::kRunUnit;
    lends ? unit(unit_of(action)).prepare_gradients() : pass(action);
  }
  free_units();
  end_pass();
}

void Executor::update(const Turn& turn, const Update& write) {
  begin(turn);
  for (; next_ < end_; ++next_) {
    const size_t index = unit_of(action(next_));
    switch (action(next_).kind) {
      case ActionKind::kUpdate:
        unit(index).end_step(write(index));
        break;
      case ActionKind::kReshard:
        unit(index).reshard();
        break;
      case ActionKind::kUnshard:
        unit(index).gather_update();
        break;
      default:
        break;
    }
  }
  // What else is whole has the values before the update.
  for (const auto& unit : units_) unit->reshard();
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

void Executor::follow(bool gathers, size_t index) {
  gathers ? unit(index).start_unshard() : unit(index).reshard();
}

}  // namespace trireme::parallel
