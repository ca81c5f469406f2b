#include "trireme/plan/pipeline.h"

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

Schedule schedule_of(const Config& config, int64_t micro_batches) {
  const PipelineConfig& pipeline = config.pipeline;
  const int64_t ranks = config.parallel.pp;
  if (pipeline.file.empty()) {
    try {
      return make_schedule(pipeline.schedule, {ranks, micro_batches, pipeline.chunks});
    } catch (const ConfigError& error) {
      throw ConfigError(
          "{} (parallel.pp); set pipeline.micro_batches or train.global_batch accordingly, or take another "
          "pipeline.schedule",
          error.what());
    }
  }
  Schedule schedule = read_schedule(pipeline);
  if (std::ssize(schedule.ranks) != ranks) {
    throw ConfigError("[plan.pipeline] the schedule of {} is for {} ranks; set parallel.pp={} (now {})",
                      pipeline.file, schedule.ranks.size(), schedule.ranks.size(), ranks);
  }
  simulate(schedule);
  return schedule;
}

StageSplit split_of(const Config& config, const Schedule& schedule) {
  const StageCut& cut = config.pipeline.split;
  const int64_t stages = schedule.stages;
  const bool by_cost = cut.kind == StageCut::Kind::kCost;
  const auto parts = stage_parts(config.model, describe(config.model, config.data.seq_len),
                                 /*spread_head=*/false, by_cost ? CutAt::kHalves : CutAt::kBlocks);
  if (stages > config.model.n_layers + 1) {
    throw ConfigError(
        "[plan.pipeline] {} stages, but the model has {} blocks and the head to share out; lower "
        "parallel.pp={}{}, "
        "or raise model.n_layers",
        stages, config.model.n_layers, config.parallel.pp,
        stages > config.parallel.pp ? " or the stages that a rank has (pipeline.chunks, pipeline.schedule)"
                                    : "");
  }
  if (by_cost) return split_by_cost(parts, stages, 0.0, schedule.ranks_of_stages());
  if (cut.kind == StageCut::Kind::kEven) return split_evenly(parts, stages);
  if (std::ssize(cut.blocks) != stages) {
    throw ConfigError(
        "[plan.pipeline] pipeline.split={} cuts the model into {} stages, the schedule has {}; give {} "
        "numbers",
        to_text(cut), cut.blocks.size(), stages, stages);
  }
  return split_by_blocks(parts, cut.blocks);
}

}  // namespace

Schedule read_schedule(const PipelineConfig& config) {
  std::string text;
  try {
    text = read_file(config.file);
  } catch (const Error& error) {
    throw ConfigError("[plan.pipeline] pipeline.file={} cannot be read: {}; name a CSV file", config.file,
                      error.what());
  }
  return from_csv(text, config.placement, config.file);
}

PipelinePlan plan_pipeline(const Config& config, const BatchPlan& batch) {
  PipelinePlan plan;
  plan.schedule = schedule_of(config, batch.accumulation);
  plan.split = split_of(config, plan.schedule);
  return plan;
}

}  // namespace trireme::plan
