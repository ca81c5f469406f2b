#pragma once
// The step of one rank of a pipeline as one program: passes of its stages in the order of the schedule, what
// their engines gather and reduce meanwhile, and what stages send each other.
#include <cstdint>
#include <optional>
#include <vector>

#include "trireme/plan/lowering.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// A stage of the rank.
struct ProgramStage {
  int64_t index = 0;
  std::vector<ProgramUnit> units;
  EngineSetting setting;  ///< of its engine, over the ranks that hold the stage
  UseOrder order;         ///< in which its module uses the units
  bool tied = false;      ///< a parameter of it has a copy in another stage
};

/// Bytes of messages for a micro-batch; by default 0, where nobody knows them yet.
struct MessageBytes {
  std::vector<int64_t> boundaries = {};  ///< by stage, what it gives the next one, or a head that is spread
  int64_t part = 0, totals = 0;          ///< of a head that is spread
  /// `stage` receives it.
  int64_t of(Message message, int64_t stage) const;
};

/// Elements of each tied parameter of the rank whose other copy another rank has, in the order of their sums.
using TiedElements = std::vector<int64_t>;

/// `actions` are those of the rank (lower()), or of forward passes alone (lower_forward()); `stages` are all
/// that it has, in rising order. A pass of a stage whose units nobody has declared, or that has none, is one
/// action for all of the stage. Receive buffers belong to the first unit of their stage.
/// Gradients of tied units are summed behind all passes, and reduced then.
StepProgram stage_program(const Schedule& schedule, const StageActions& actions,
                          const std::vector<ProgramStage>& stages, const MessageBytes& bytes,
                          const TiedElements& tied = {});

/// That of a stage's engine: where two ranks have a copy of each stage both are data-parallel ranks of it.
EngineSetting setting_in_stages(EngineSetting setting, const Schedule& schedule);

/// The micro-batch of which the backward pass of a stage reduces its gradients meanwhile: the last of all
/// passes of the stage. None where gradients are complete only behind all passes: those of weights come
/// apart, a copy of a parameter is elsewhere, or two ranks run the stage in different orders.
std::optional<int64_t> reducing_micro_batch(const Schedule& schedule, const StageActions& actions,
                                            int64_t stage, bool tied);

}  // namespace trireme::plan
