// Rules of runs in stages. What needs the number of ranks is checked where that is known (plan/pipeline.h).
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/plan/schedule.h"

namespace trireme::plan {
namespace {

void check_spread_head(const Config& config, const Origins& origins) {
  const std::string spread = said(origins, "pipeline.spread_head", true);
  if (const auto two_ways = said_two_ways(config, origins)) {
    throw ConfigError(
        "[plan.config] {} with {}: micro-batches leave the model on two ranks, and all others would have "
        "to serve both at once; take a schedule of stages that go one way, such as dualpipe_v, or set "
        "pipeline.spread_head=false",
        spread, *two_ways);
  }
  const CommHook hook = config.parallel.comm_hook;
  if (keeps_residual(hook) || hook == CommHook::kLocalSgd) {
    throw ConfigError(
        "[plan.config] {} with {}: what a rank remembers of a parameter is saved under its name, and of the "
        "head's weight every rank of the pipeline has a part; set parallel.comm_hook to none or fp16, or "
        "pipeline.spread_head to false",
        spread, said(origins, "parallel.comm_hook", hook));
  }
  const Fp8Config& fp8 = config.precision.fp8;
  if (fp8.recipe != Fp8::kOff && fp8.head) {
    throw ConfigError(
        "[plan.config] {} with {}: parts of the head multiply in precision.compute; set precision.fp8_head "
        "to false, or pipeline.spread_head",
        spread, said(origins, "precision.fp8_head", fp8.head));
  }
}

}  // namespace

std::optional<std::string> said_two_ways(const Config& config, const Origins& origins) {
  const PipelineConfig& pipeline = config.pipeline;
  if (!pipeline.file.empty()) {
    if (pipeline.placement != Placement::kTwoWays) return std::nullopt;
    return said(origins, "pipeline.placement", pipeline.placement);
  }
  if (pipeline.schedule != ScheduleName::kDualPipe) return std::nullopt;
  return said(origins, "pipeline.schedule", pipeline.schedule);
}

void check_pipeline(const Config& config, const Origins& origins) {
  const ParallelConfig& parallel = config.parallel;
  const std::string stages = said(origins, "parallel.pp", parallel.pp);
  if (parallel.bucket_mib > 0.0) {
    throw ConfigError(
        "[plan.config] {} with {}: the engine of a stage reduces its blocks one by one; set "
        "parallel.bucket_mib to 0",
        said(origins, "parallel.bucket_mib", parallel.bucket_mib), stages);
  }
  if (parallel.reduce_when != ReduceWhen::kOncePerStep) {
    throw ConfigError(
        "[plan.config] {} with {}: several micro-batches are under way in a stage, whose gradients are "
        "complete at the end of the step only; set parallel.reduce_when to once",
        said(origins, "parallel.reduce_when", parallel.reduce_when), stages);
  }
  const PipelineConfig& pipeline = config.pipeline;
  if (pipeline.spread_head) check_spread_head(config, origins);
  const int64_t defaults = PipelineConfig{}.chunks;
  if (pipeline.file.empty() && pipeline.chunks != defaults && !takes_chunks(pipeline.schedule)) {
    throw ConfigError("[plan.config] {} with {}, whose number of stages a rank is fixed; remove it",
                      said(origins, "pipeline.chunks", pipeline.chunks),
                      said(origins, "pipeline.schedule", pipeline.schedule));
  }
  const auto blocks = pipeline.split.kind == StageCut::Kind::kBlocks;
  if (blocks && std::accumulate(pipeline.split.blocks.begin(), pipeline.split.blocks.end(), int64_t{0}) !=
                    config.model.n_layers) {
    throw ConfigError("[plan.config] {} does not add up to {}; share out all blocks",
                      said(origins, "pipeline.split", to_text(pipeline.split)),
                      said(origins, "model.n_layers", config.model.n_layers));
  }
}

}  // namespace trireme::plan
