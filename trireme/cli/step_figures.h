#pragma once
// Figures of a step program that tables and JSON show. Internal to step_view.h.
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "trireme/cli/step_view.h"
#include "trireme/plan/step_program.h"

namespace trireme::cli {

std::string unit_name(const plan::StepProgram& program, int64_t unit);

/// Bytes that a rank sends a step. With local SGD parameters are those of a step that averages them.
struct Sent {
  int64_t parameters;
  std::optional<int64_t> gradients;  ///< none: no formula tells for the communication hook
  int64_t boundaries;
  int64_t activations;  ///< within passes, among ranks that share layers or statistics
  std::optional<int64_t> total() const {
    return gradients ? std::optional(parameters + *gradients + boundaries + activations) : std::nullopt;
  }
};

Sent sent_by(const StepView& view);

/// Memory of a program at each of its actions, and where it is most.
class StepMemory {
 public:
  explicit StepMemory(const plan::StepProgram& program);

  int64_t state() const { return kept_.total(); }
  int64_t peak() const { return peak_; }
  const plan::HeldBytes& at(int64_t action) const { return held_[static_cast<size_t>(action)]; }
  int64_t total(int64_t action) const { return at(action).total(); }
  int64_t total_after(int64_t action) const { return total(action) - freed_[static_cast<size_t>(action)]; }
  /// Bytes of `roles` on top of those kept from step to step.
  int64_t extra(int64_t action, std::initializer_list<plan::Role> roles) const;

 private:
  plan::HeldBytes kept_;
  std::vector<plan::HeldBytes> held_;
  std::vector<int64_t> freed_;  ///< once the action is done
  int64_t peak_ = 0;
};

/// Why the passes of this step are not recorded as CUDA graphs; empty: nothing is known to be in the way.
std::string obstacle_to_recording(const StepView& view);

/// The pipeline rank of global rank `rank`; of rank 0 where none is given.
int64_t pp_rank_of(const RunPlan& run, std::optional<int64_t> rank);

/// Elements of a unit's flat layout that a rank has for itself.
struct Ranges {
  int64_t begin, end;                ///< of its parameters between steps
  int64_t update_begin, update_end;  ///< of what its optimizer updates
};

Ranges ranges_of(const RunPlan& run, int64_t rank, int64_t numel);

}  // namespace trireme::cli
