#pragma once
// The pipeline of a config: the schedule of a run, and where its model is cut into stages.
#include <cstdint>
#include <string>

#include "trireme/plan/batch.h"
#include "trireme/plan/schedule.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {

struct PipelinePlan {
  Schedule schedule;
  StageSplit split;
};

/// The costs of passes of the plan's stages: work_of() each; a part of the head has two products forward and
/// one backward.
PassCosts work_of_passes(const PipelinePlan& plan);

/// Where a model of these parts is cut for `schedule`: cuts that balance ranks move, one or two at a time, as
/// long as the simulated step becomes shorter and no rank gets more work than the busiest had: GPUs at their
/// power limit slow down when they never idle. For large schedules the search ends after about a tenth of a
/// second. Stages of a model whose head is spread are balanced alone. Throws as split_by_cost().
StageSplit split_for(const Schedule& schedule, const std::vector<StagePart>& parts,
                     double spread_flops = 0.0);

/// Every rank of the plan's schedule gets rows of a head whose FLOPs its split has spread. Throws ConfigError
/// as spread_head() and share_rows().
void spread_head(PipelinePlan& plan, const ModelConfig& model);

/// Whether gradients that a hook sends stay equal where two stages have copies of a parameter. Those that
/// choose scales, elements or factors by buffer see a copy beside other neighbours.
bool keeps_copies_equal(CommHook hook);

/// For parallel.pp above 1 and a complete config. Throws ConfigError that says which key to change when the
/// schedule does not take that many micro-batches, cannot run, is too large to plan, or has more stages than
/// the model has parts, and where copies of tied embeddings would not stay equal.
PipelinePlan plan_pipeline(const Config& config, const BatchPlan& batch);

/// The schedule of a CSV file. Throws ConfigError when it cannot be read.
Schedule read_schedule(const std::string& file, Placement placement);

/// That of pipeline.file as to_csv() writes it; empty where the config has no pipeline or no such file.
std::string schedule_text(const Config& config);

}  // namespace trireme::plan
