#pragma once
// Runs the passes of step programs (plan/step_program.h) for the units of one engine. The engine announces
// what the module does: that a unit is about to be used, was left, or has complete gradients. At each of
// these points the executor issues what the program lists up to it, so that collectives come in the program's
// order on every rank.
//
// What the module does and the program does not list is done out of turn: a unit is gathered when it is used
// and freed when it is left. The way that the module went is kept (seen()), for the next program.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "trireme/parallel/engine_programs.h"
#include "trireme/parallel/flat_unit.h"
#include "trireme/plan/step_program.h"

namespace trireme::parallel {

class Executor {
 public:
  using Units = std::vector<std::unique_ptr<FlatUnit>>;

  /// `units` must outlive this; `use_from` says who announces their use.
  Executor(const Units& units, plan::UseFrom use_from);

  /// Whether the last forward pass that was begun is one that trains.
  bool trains() const { return trains_; }

  // A forward pass. Units are whole for the current stream from enter_forward() to leave_forward(); the root
  // until the update.
  void begin_forward(const Turn& turn, bool trains);
  void enter_forward(size_t unit);
  void leave_forward(size_t unit);

  // A backward pass, the last of a step or one that others follow; or what completes gradients behind it.
  void begin_backward(const Turn& turn, bool last);
  void enter_backward(size_t unit);
  void leave_backward(size_t unit);
  /// The gradients of all parameters of `unit` that are trained are complete.
  void complete(size_t unit);
  /// Reduces what is left, with gradients of zero where a unit took no part, frees units, and waits.
  void end_backward();

  /// Issues what a forward and a backward pass issue, but computes nothing, for a rank that has no data.
  void replay(const Turn& forward, const Turn& backward, bool last);
  /// The way of the module in the last pass forward and the last one back; no reductions.
  const plan::UseOrder& seen() const { return seen_; }

  /// Writes to the masters of a unit. Returns the event behind it on the stream that wrote.
  using Update = std::function<SideStream::Event(size_t unit)>;
  /// Updates units in the order of the pass. What is whole is freed or gathered again, as the pass says.
  /// Collective where units are gathered.
  void update(const Turn& turn, const Update& write);

  /// Forgets the pass under way; waits for the reductions that the pass has begun.
  void abandon();
  /// Issues the reductions that the last pass of a step put off when it was recorded, in the order in which
  /// it would have issued them; the current stream waits for them.
  void reduce_launched();

  /// The units in the order in which this rank completed them in the last backward pass, unused ones last.
  std::vector<int64_t> completions() const;

  /// Units stay whole while there are holds.
  void hold(int change) { holds_ += change; }
  bool holds() const { return holds_ > 0; }
  /// Called before a unit is gathered or freed, while no pass trains.
  using Observer = std::function<void(bool gathers, size_t unit)>;
  void observe(Observer observer) { observer_ = std::move(observer); }
  /// Does what an Observer saw on another rank.
  void follow(bool gathers, size_t unit);

  /// Reductions begun so far, one a unit.
  int64_t reductions() const { return reductions_; }
  void set_reductions_begun(int64_t count) { reductions_ = count; }

 private:
  enum class State : char { kIdle, kInUse, kOutOfTurn };

  FlatUnit& unit(size_t index) const { return *units_[index]; }
  bool is_root(size_t unit) const { return unit == 0 && use_from_ != plan::UseFrom::kBuckets; }
  size_t unit_of(const plan::Action& action) const {
    return static_cast<size_t>(action.unit - turn_.first_unit);
  }
  const plan::Action& action(size_t place) const { return turn_.program->actions[place]; }
  bool uses_parameters() const;
  plan::ActionKind backward_kind() const;
  void begin(const Turn& turn);
  void end_pass();
  bool advance_to(plan::ActionKind kind, size_t unit);
  void advance();
  bool is_due(const plan::Action& action) const;
  void pass(const plan::Action& action);
  void pass_rest();
  void issue(const plan::Action& action);
  void issue_on_gradients(const plan::Action& action);
  void reshard(size_t unit);
  void reduce(const plan::Action& action);
  void issue_late();
  void free_units();
  void prepare_gradients_ahead();
  void record(plan::UseOrder::Event::Kind kind, size_t unit);

  const Units& units_;
  plan::UseFrom use_from_;
  plan::UseOrder seen_;  ///< of the passes under way

  Turn turn_;                  ///< the pass under way; no program: none is
  size_t next_ = 0, end_ = 0;  ///< of its actions; nothing is left where no pass is under way
  size_t last_waits_ = 0;      ///< where the waits begin that end the pass; its caller issues them
  bool trains_ = false, in_backward_ = false, last_ = false;
  std::vector<State> states_;   ///< by unit, in the pass under way
  std::vector<bool> complete_;  ///< by unit, in the backward pass under way
  /// Actions on gradients that the program was past before the gradients were complete, in its order.
  std::deque<const plan::Action*> late_;
  std::vector<plan::Action> put_off_;  ///< actions on gradients, by the recording of a step's last pass
  int holds_ = 0;
  Observer observer_;
  int64_t reductions_ = 0;
};

}  // namespace trireme::parallel
