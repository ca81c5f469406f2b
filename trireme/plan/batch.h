#pragma once
// The batch equation: global_batch = micro_batch x accumulation x data-parallel ranks.
#include <cstdint>

#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"

namespace trireme::plan {

struct BatchPlan {
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t accumulation = 0;  ///< forward/backward passes per optimizer step: micro-batches of a pipeline
  int64_t dp_size = 0;
};

/// Solves for the accumulation; micro_batch = 0 means one pass. Throws ConfigError that prints the equation
/// with all numbers and the nearest valid settings.
BatchPlan plan_batch(int64_t global_batch, int64_t micro_batch, int64_t dp_size);
/// The batch of a run. The micro-batches of a pipeline are those of pipeline.micro_batches, of its schedule
/// or of train.micro_batch; if none says a number, about four times as many as ranks. Throws as above, and
/// when two of these disagree.
BatchPlan plan_batch(const Config& config, const MeshShape& mesh);

}  // namespace trireme::plan
