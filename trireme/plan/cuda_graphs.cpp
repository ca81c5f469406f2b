#include "trireme/plan/cuda_graphs.h"

#include <fmt/format.h>

#include <algorithm>

#include "trireme/plan/adapter.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

/// The last kernels of a pass take a few hundredths of the host's time for a small model. A host that is not
/// half as fast again as its device loses that lead whenever its core does something else: ResNet-18 on an
/// H200 trained at 65,000 to 80,000 images/s without a recording, at 80,000 to 81,000 with one.
constexpr double kMostLag = 0.5;

StepProgram step_of(const Config& config, int64_t ranks) {
  const MeshShape mesh = MeshShape::fit(config.parallel, ranks);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
  return config_program(config, facts, batch,
                        engine_setting(config, mesh, batch.accumulation, Device::kCuda));
}

/// For a single rank, the settings that keep it from using gradients as they were computed.
std::string settings_behind(const Config& config, int64_t ranks) {
  const PrecisionConfig& precision = config.precision;
  if (ranks > 1) return {};
  if (wire_dtype(precision) != precision.compute) {
    return fmt::format(", because their dtype changes: precision.compute={}, precision.reduce={}",
                       precision.compute, precision.reduce);
  }
  return fmt::format(", because parallel.reduce_when={}", config.parallel.reduce_when);
}

/// The communication of several ranks in the middle of passes.
std::string communication_in_passes(const Config& config, int64_t ranks) {
  if (ranks == 1) return {};
  if (reads_images(config.model.family) && config.model.vision.norm == ImageNorm::kSyncBatch)
    return fmt::format("{} ranks sum statistics within a pass (model.norm=sync_batch)", ranks);
  if (config.precision.fp8.recipe != Fp8::kOff)
    return fmt::format("{} ranks exchange scales within a pass (precision.fp8={})", ranks,
                       config.precision.fp8.recipe);
  if (config.parallel.reduce_when == ReduceWhen::kEveryMicroBatch)
    return fmt::format("{} ranks reduce gradients in every pass (parallel.reduce_when={})", ranks,
                       config.parallel.reduce_when);
  return {};
}

}  // namespace

std::string cuda_graphs_obstacle(const Config& config, bool gpu, int64_t ranks) {
  const ParallelConfig& parallel = config.parallel;
  if (!gpu) return "training runs on the CPU";
  if (config.data.format != DataFormat::kText)
    return fmt::format("micro-batches weigh as much as they have tokens to learn (data.format={})",
                       config.data.format);
  if (config.data.reset_attention)
    return "tables of documents have other sizes in other batches (data.reset_attention=true)";
  if (parallel.pp > 1) {
    return fmt::format("passes wait for other stages of the pipeline (parallel.pp={})", parallel.pp);
  }
  for (const auto& [key, ranks] : {std::pair("tp", parallel.tp), std::pair("cp", parallel.cp)})
    if (ranks > 1)
      return fmt::format("ranks exchange activations within a pass (parallel.{}={})", key, ranks);
  if (scales_loss(config.precision)) return "the loss scale changes between steps (precision.scaling)";
  if (parallel.comm_hook != CommHook::kNone) {
    return fmt::format("gradients pass through a hook (parallel.comm_hook={})", parallel.comm_hook);
  }
  if (const std::string obstacle = communication_in_passes(config, ranks); !obstacle.empty()) return obstacle;
  if (const std::string obstacle = recording_obstacle(step_of(config, ranks)); !obstacle.empty())
    return obstacle + settings_behind(config, ranks);
  if (computes_blocks_again(config.memory.recompute) && draws_in_training(config.model)) {
    return fmt::format(
        "recomputed blocks must draw the same random numbers again (memory.recompute={} with {}.dropout)",
        config.memory.recompute, config.model.dropout > 0.0 ? "model" : "adapter");
  }
  if (config.train.epochs == 0 && config.train.steps <= kStepsBeforeRecording) {
    return fmt::format("the first {} steps run without them and train.steps={}", kStepsBeforeRecording,
                       config.train.steps);
  }
  return {};
}

bool device_waits_for_host(std::vector<double> lags) {
  if (lags.empty()) return false;
  const auto middle = lags.begin() + static_cast<std::ptrdiff_t>(lags.size() / 2);
  std::nth_element(lags.begin(), middle, lags.end());
  return *middle <= kMostLag;
}

bool may_stay(int64_t bytes, int64_t free_bytes) {
  constexpr int64_t kShare = 4;
  return bytes <= free_bytes / kShare;
}

}  // namespace trireme::plan
