#pragma once
// Builds a step program action by action. Buffers that come and go are opened and closed between actions;
// those that have memory from step to step are added when all actions are there (kept_buffers.h).
#include <cstdint>
#include <map>
#include <vector>

#include "trireme/plan/step_program.h"

namespace trireme::plan {

class StepBuilder {
 public:
  explicit StepBuilder(const std::vector<ProgramUnit>& units) { program_.units = units; }

  const ProgramUnit& unit(int64_t unit) const { return program_.units[static_cast<size_t>(unit)]; }
  int64_t units() const { return std::ssize(program_.units); }
  const Action& action(int64_t place) const { return program_.actions[static_cast<size_t>(place)]; }
  /// Of the pass under way.
  int64_t micro_batch() const { return micro_batch_; }

  /// The actions from now on belong to this pass.
  void begin_pass(Pass::Kind kind, int64_t micro_batch);
  /// Returns the place of the action.
  int64_t add(ActionKind kind, int64_t unit, Lane lane, std::vector<Transfer> transfers = {});
  /// Computation goes on once the action at `awaited` has run.
  void wait_for(int64_t awaited);
  /// Memory from the next action on.
  void open(Role role, int64_t unit, int64_t bytes, int64_t micro_batch = Action::kOnceAStep);
  /// No memory after the last action; nothing happens where there is none.
  void close(Role role, int64_t unit, int64_t micro_batch = Action::kOnceAStep);
  bool is_open(Role role, int64_t unit) const { return open_.contains({role, unit, Action::kOnceAStep}); }

  /// The program, with all buffers closed.
  StepProgram take();

 private:
  struct Key {
    Role role;
    int64_t unit, micro_batch;
    auto operator<=>(const Key&) const = default;
  };

  int64_t next() const { return std::ssize(program_.actions); }

  StepProgram program_;
  std::map<Key, size_t> open_;  ///< their places in StepProgram::buffers
  int64_t micro_batch_ = Action::kOnceAStep;
};

}  // namespace trireme::plan
