#pragma once
// The most that a rank holds at one moment of a step: the buffers of its program, and what passes take beside
// them.
#include <cstdint>

#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Buffers that come and go, but whose memory stays and is given to the next unit.
enum class Pooled {
  kNothing,
  kWholeGradients,  ///< in the dtype of computation, to a unit of the same stage: GPUs read each other's
  kGathered         ///< all that is gathered for use, gradients and sums: on CPUs (parallel/storage.h)
};

/// Bytes that passes of a rank hold beside the buffers of its program.
struct BesideProgram {
  int64_t loss_stage = -1;   ///< the stage whose passes make the loss; -1: no stage of this rank does
  int64_t loss_at_work = 0;  ///< in the last forward action of such a pass
  int64_t loss_again = 0;    ///< in the first action of the micro-batch's backward pass
  int64_t loss_kept = 0;     ///< from that action on, until the first one of the micro-batch's backward pass
  int64_t activations = 0;   ///< from that action on, up to that one, where the program has none
  int64_t in_backward = 0;   ///< by a unit in its backward pass, beside what it kept
  int64_t decoded = 0;       ///< in forward and backward passes of units
  Pooled pooled = Pooled::kNothing;
};

/// Bytes that a rank holds at one action of its step.
struct StepPeak {
  int64_t action = 0;       ///< in StepProgram::actions
  int64_t kept = 0;         ///< from step to step
  int64_t gathered = 0;     ///< parameters that are gathered for use, gradients and their sums
  int64_t activations = 0;  ///< of all micro-batches
  int64_t boundaries = 0;   ///< for what stages receive
  int64_t for_loss = 0, in_backward = 0, decoded = 0;  ///< as BesideProgram has them
  /// The largest int64_t where the sum does not fit.
  int64_t total() const;
};

/// The action at which a rank holds most, the first of several. `program` has actions.
StepPeak peak_of_step(const StepProgram& program, const BesideProgram& beside);

/// The most that units in flight hold at once on top of model state: parameters that are gathered for use,
/// gradients that are not reduced yet, sums of earlier micro-batches.
int64_t gathered_bytes(const StepProgram& program);

}  // namespace trireme::plan
