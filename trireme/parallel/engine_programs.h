#pragma once
// The step programs of an engine (plan/step_program.h). They are written from its setting and from the order
// in which its module uses the units, declared or recorded, and written anew when one of the two changes.
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/parallel/flat_unit.h"
#include "trireme/plan/step_program.h"

namespace trireme::parallel {

/// A pass of a program for the engine whose first unit is `first_unit` there.
struct Turn {
  std::shared_ptr<const plan::StepProgram> program;
  const plan::Pass* pass = nullptr;  ///< of that program
  int64_t first_unit = 0;
};

class EnginePrograms {
 public:
  using Units = std::vector<std::unique_ptr<FlatUnit>>;

  /// `units` must outlive this. With UseFrom::kRunUnit they are in the order of a forward pass.
  EnginePrograms(const Units& units, const plan::EngineSetting& setting);

  /// A step of two micro-batches: the first stands for all but the last.
  const plan::StepProgram& step() const { return *step_; }

  // The next pass: the one that run_next() was given, or a pass of the engine's own programs.
  Turn forward(bool trains);
  Turn backward(bool last);
  /// Gradients of weights that an earlier backward pass has deferred.
  Turn backward_weight() { return next(apart_, plan::Pass::Kind::kBackwardWeight, 0); }
  /// Gradients that earlier passes have left are reduced.
  Turn reduce() { return next(apart_, plan::Pass::Kind::kReduce, plan::Action::kOnceAStep); }
  Turn update() { return next(step_, plan::Pass::Kind::kUpdate, plan::Action::kOnceAStep); }
  /// The engine's next pass is this one, of a program that has other engines' passes, too.
  void run_next(Turn turn) { given_ = std::move(turn); }

  /// The module has gone this way in a pass forward and back.
  void follow(const plan::UseOrder& seen);
  /// Whether the order is one that the module has gone, which a rank without data can repeat.
  bool recorded() const { return recorded_; }
  /// The order in which all ranks reduce from now on.
  void set_reductions(std::vector<int64_t> order);
  /// Parameters were frozen or thawed. Where parameters come and go, ranks without data may no longer repeat
  /// what they have recorded: it must gather the same units as the order of the other ranks.
  void follow_freezing();
  /// Units keep their memory from now on (DataParallel::stay_in_place()).
  void stay_in_place();

 private:
  using Program = std::shared_ptr<const plan::StepProgram>;
  Turn next(const Program& own, plan::Pass::Kind kind, int64_t micro_batch);
  std::vector<plan::ProgramUnit> program_units() const;
  plan::UseOrder order_of(const std::vector<plan::ProgramUnit>& units);
  void write();

  const Units& units_;
  plan::EngineSetting setting_;
  plan::UseOrder order_;
  bool recorded_ = false;
  Program step_, inference_;
  Program apart_;  ///< of passes that come apart from the backward passes whose gradients they complete
  std::optional<Turn> given_;
};

}  // namespace trireme::parallel
