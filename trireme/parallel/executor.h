#pragma once
// Interprets step programs (plan/step_program.h) for one rank. The engine announces what the module does:
// that a unit is about to be used, was left, or has complete gradients. At each of these points the executor
// issues what the program lists up to it, so that collectives come in the program's order on every rank.
//
// What is not in the program, because the module takes another way than before, is done out of turn: a unit
// is gathered when it is used and freed when it is left. The way that was taken is recorded, and becomes the
// program of the next pass. So modules whose order nobody has declared begin with an empty program.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "trireme/parallel/flat_unit.h"
#include "trireme/plan/step_program.h"

namespace trireme::parallel {

class Executor {
 public:
  using Units = std::vector<std::unique_ptr<FlatUnit>>;

  /// `units` must outlive this. With UseFrom::kRunUnit they are in the order of a forward pass.
  Executor(const Units& units, const plan::EngineSetting& setting);

  /// Whether the last forward pass that was begun is one that trains.
  bool trains() const { return trains_; }

  // A forward pass. Units are whole for the current stream from enter_forward() to leave_forward(); the root
  // until the update.
  void begin_forward(bool trains);
  void enter_forward(size_t unit);
  void leave_forward(size_t unit);

  // A backward pass, the last of a step or one that others follow.
  void begin_backward(bool last);
  void enter_backward(size_t unit);
  void leave_backward(size_t unit);
  /// The gradients of all parameters of `unit` that are trained are complete.
  void complete(size_t unit);
  /// Reduces what is left, with gradients of zero where a unit took no part, frees units, and waits.
  void end_backward();
  /// Ends a pass that only added to gradients which earlier passes have left: as end_backward(), but nothing
  /// is gathered.
  void end_without_units();

  /// Issues what a forward and a backward pass issue, but computes nothing, for a rank that has no data.
  void replay(bool last);
  /// Whether there was a whole backward pass whose order replay() can take.
  bool can_replay() const { return recorded_; }

  /// Units in the order in which they are updated.
  const std::vector<size_t>& update_order() const { return update_order_; }

  /// Forgets the pass under way; waits for the reductions that the pass has begun.
  void abandon();
  /// Units keep their memory from now on (DataParallel::stay_in_place()).
  void stay_in_place();
  /// Issues the reductions that the last pass of a step put off when it was recorded, in the order in which
  /// it would have issued them; the current stream waits for them.
  void reduce_launched();

  /// completions(): the units in the order in which this rank completed them in the last backward pass,
  /// unused ones last. set_reductions(): the order in which all ranks reduce from now on.
  std::vector<int64_t> completions() const;
  void set_reductions(std::vector<int64_t> order);
  /// Parameters were frozen or thawed.
  void follow_freezing();

  /// Units stay whole while there are holds.
  void hold(int change) { holds_ += change; }
  bool holds() const { return holds_ > 0; }
  /// Called before a unit is gathered or freed, while no pass trains.
  using Observer = std::function<void(bool gathers, size_t unit)>;
  void observe(Observer observer) { observer_ = std::move(observer); }
  /// Does what an Observer saw on another rank.
  void follow(bool gathers, size_t unit);

  /// The program of a step of two micro-batches, as it is interpreted.
  const plan::StepProgram& program() const { return training_; }
  /// Reductions begun so far, one a unit.
  int64_t reductions() const { return reductions_; }
  void set_reductions_begun(int64_t count) { reductions_ = count; }

 private:
  enum class State : char { kIdle, kInUse, kOutOfTurn };

  FlatUnit& unit(size_t index) const { return *units_[index]; }
  bool is_root(size_t unit) const { return unit == 0 && setting_.use_from != plan::UseFrom::kBuckets; }
  void write_programs();
  void begin(const plan::StepProgram& program, plan::Pass::Kind kind, int64_t micro_batch);
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
  plan::EngineSetting setting_;
  plan::UseOrder order_;  ///< of the programs
  plan::UseOrder seen_;   ///< of the passes under way
  bool recorded_ = false;
  plan::StepProgram training_, inference_;
  std::vector<size_t> update_order_;

  const plan::StepProgram* program_ = nullptr;  ///< of the pass under way
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
