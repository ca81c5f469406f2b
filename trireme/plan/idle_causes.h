#pragma once
// Why ranks of a pipeline were idle, from the order of events alone. Internal to pipeline_report.cpp.
#include "trireme/plan/pipeline_report.h"

namespace trireme::plan {

/// By rank, in the order of time, without time in passes: from 0 to `seconds`, when the last pass ends.
/// `events` are of a step of `schedule`; `ideal` is the step if stages took equally long and nothing else
/// took time.
std::vector<std::vector<IdleSpan>> idle_spans(const Schedule& schedule, const StageEvents& events,
                                              double seconds, const Simulation& ideal);

}  // namespace trireme::plan
