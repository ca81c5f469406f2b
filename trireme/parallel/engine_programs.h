#pragma once
// The step programs of an engine (plan/step_program.h). They are written from its setting and from the order
// in which its module uses the units, declared or recorded, and written anew when one of the two changes.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
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

  /// A step of two micro-batches: the first stands for all but the last. Or what take_step() was given.
  const plan::StepProgram& step() const { return *step_; }

  /// From now on the engine runs the passes of `step`, for steps of `micro_batches`, of which it shows all or
  /// StepProgram::kMicroBatchesShown. pin()s.
  void take_step(plan::StepProgram step, int64_t micro_batches);
  /// From now on programs stay as they are, whatever way the module goes; parameters that are frozen or
  /// thawed are refused.
  void pin() { pinned_ = true; }
  bool pinned() const { return pinned_; }
  /// The micro-batches of the step under way are forgotten.
  void begin_step() { micro_batch_ = 0; }

  /// While it lives, passes of the kind of `turn` are that one, of a program that has other engines' passes,
  /// too.
  class Given {
   public:
    Given(EnginePrograms& programs, Turn turn) : programs_(programs) { programs_.given_ = std::move(turn); }
    ~Given() { programs_.given_.reset(); }
    Given(const Given&) = delete;
    Given& operator=(const Given&) = delete;

   private:
    EnginePrograms& programs_;
  };
  /// Updates are this pass, until the engine's own programs change.
  void give_update(Turn turn) { given_update_ = std::move(turn); }

  // The next pass: one that was given, or of the engine's own programs.
  Turn forward(bool trains);
  Turn backward(bool last);
  /// Gradients of weights that an earlier backward pass has deferred.
  Turn backward_weight() { return next(apart_, plan::Pass::Kind::kBackwardWeight, 0); }
  /// Gradients that earlier passes have left are reduced.
  Turn reduce() { return next(apart_, plan::Pass::Kind::kReduce, plan::Action::kOnceAStep); }
  Turn update();

  // What programs are written from; another version() has others.
  const std::vector<plan::ProgramUnit>& units() const { return program_units_; }
  const plan::EngineSetting& setting() const { return setting_; }
  const plan::UseOrder& order() const { return written_; }
  int64_t version() const { return version_; }

  /// The module has gone this way in a pass forward and `back`.
  void follow(const plan::UseOrder& seen, plan::Pass::Kind back);
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
  int64_t shown_micro_batch(bool last) const;
  Turn next(const Program& own, plan::Pass::Kind kind, int64_t micro_batch);
  void take_units();
  void take_order();
  void write();

  const Units& units_;
  plan::EngineSetting setting_;
  plan::UseOrder order_;
  bool recorded_ = false, pinned_ = false;
  int64_t micro_batches_ = 2;  ///< of a step of step_; the last of step_ is the last of a step
  int64_t micro_batch_ = 0;    ///< of the step under way
  std::vector<plan::ProgramUnit> program_units_;
  plan::UseOrder written_;  ///< order_ with all reductions of units that are trained
  int64_t version_ = 0;
  Program step_, inference_;
  Program apart_;  ///< of passes that come apart from the backward passes whose gradients they complete
  std::optional<Turn> given_, given_update_;
};

}  // namespace trireme::parallel
