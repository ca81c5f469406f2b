#pragma once
// A step program for people and for scripts: its actions with the bytes that each sends and the memory that
// the rank has then, what is sent in all, and what takes memory at the peak.
#include <cstdint>
#include <optional>
#include <string>

#include "trireme/cli/run_plan.h"
#include "trireme/plan/step_program.h"

namespace trireme::cli {

struct StepView {
  plan::StepProgram program;
  std::string name;
  int64_t micro_batches = 1;  ///< of a step; the program may show fewer (StepProgram::kMicroBatchesShown)
  std::optional<RunPlan> planned = {};  ///< the run that it is of; none: the program was read from a file
  std::optional<int64_t> rank = {};     ///< whose ranges of each unit are listed
};

/// The step of a data-parallel rank of `run`; `rank` is the one whose ranges are listed. Throws ConfigError
/// for a rank that the run does not have.
StepView planned_step(const RunPlan& run, std::optional<int64_t> rank = {});
/// The text of the programs of all ranks of a pipeline (plan::programs_to_text()).
std::string planned_texts(const RunPlan& run);
/// A program that to_text(StepProgram) wrote and somebody may have changed. Throws ConfigError for a line
/// that cannot be read and LogicError for the first action that cannot be.
StepView step_from_text(const std::string& text, std::string name);

/// Tables in at most `columns` (0: no limit). Actions that repeat those before them for other units are one
/// line, as are passes that repeat that of an earlier micro-batch, unless `all`.
std::string to_text(const StepView& view, bool all, int64_t columns = 0);
std::string to_json(const StepView& view);

}  // namespace trireme::cli
