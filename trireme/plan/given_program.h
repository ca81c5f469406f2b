#pragma once
// Step programs that a run is given (train.step_program) in place of the planned ones: the same work in
// another order.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Programs by rank of a pipeline, each behind a line "rank R"; a single one stands for all ranks and has no
/// such line. step_programs_from_text() reads them back.
std::string programs_to_text(const std::vector<StepProgram>& programs);
/// Throws ConfigError as step_program_from_text(), and for ranks that do not count up from 0.
std::vector<StepProgram> step_programs_from_text(std::string_view text);

/// Text of the file that config names; empty: it names none. Throws ConfigError when it cannot be read.
std::string given_text(const Config& config);

/// Gives the ranks of `schedule` the order of passes that train.step_program has; without one nothing
/// happens. Throws ConfigError for another number of ranks.
void order_as_given(Schedule& schedule, const Config& config);

/// Reads train.step_program and checks it against `planned`, the programs of all ranks of a pipeline. Units,
/// passes, sums, updates and messages must be the planned ones; when parameters are gathered and freed, what
/// waits, and the order of passes may differ. Throws ConfigError that names the rank and the first action
/// that is not valid, is missing, or does not belong to the step. `own`: programs of another rank along tp,
/// whose sizes the result has; a text has those of the first. Empty: this is the first.
std::vector<StepProgram> given_programs(const Config& config, const BatchPlan& batch,
                                        const std::vector<StepProgram>& planned,
                                        const std::vector<StepProgram>& own = {});

}  // namespace trireme::plan
