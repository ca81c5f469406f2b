#pragma once
// What a config says of pipelines: the schedule of a run, and where its model is cut into stages.
#include <cstdint>
#include <string>

#include "trireme/plan/batch.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {

struct PipelinePlan {
  Schedule schedule;
  StageSplit split;
};

/// For parallel.pp above 1 and a complete config. Throws ConfigError that says which key to change when the
/// schedule does not take that many micro-batches, cannot run, is too large to plan, or has more stages than
/// the model has parts.
PipelinePlan plan_pipeline(const Config& config, const BatchPlan& batch);

/// The schedule of a CSV file. Throws ConfigError when it cannot be read.
Schedule read_schedule(const std::string& file, Placement placement);

/// That of pipeline.file as to_csv() writes it; empty where the config has no pipeline or no such file.
std::string schedule_text(const Config& config);

}  // namespace trireme::plan
