#pragma once
// Steps of pipelines for people and for tools: tables, JSON, pictures and traces of what was recorded beside
// what was simulated.
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "trireme/plan/pipeline_report.h"
#include "trireme/report/timeline.h"

namespace trireme::report {

/// Legend of bar_of(): the kinds of passes.
std::vector<std::string> pass_kinds();
/// "F3"; in lower case for the second stage of a rank; with the stage where a rank has more.
Bar bar_of(const plan::Schedule& schedule, const plan::StagePass& pass, double begin, double end);

/// Tables by rank and by stage, measured beside predicted, in at most `columns` (0: no limit).
std::string to_text(const plan::PipelineReport& report, int64_t columns = 0);
/// Seconds and bytes.
nlohmann::ordered_json to_json(const plan::PipelineReport& report);

/// In ms: the simulated step above the measured one, whose gaps have their causes.
Timeline timeline_of(const plan::PipelineReport& report);
/// Both steps as a trace that ui.perfetto.dev and chrome://tracing open: a process for the measured step and
/// one for the simulated, a thread for each rank, arrows for messages, activations in flight as counters.
std::string trace_of(const plan::PipelineReport& report);

/// Writes `directory`/`name`.svg and .trace.json. Throws EnvironmentError.
void write_pictures(const plan::PipelineReport& report, const std::string& directory,
                    const std::string& name);

}  // namespace trireme::report
