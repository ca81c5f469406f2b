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
/// That of a run: a pipeline has as many micro-batches as pipeline.micro_batches, its schedule or
/// train.micro_batch says, or else about four times as many as ranks. Throws as above, and when two of them
/// disagree.
BatchPlan plan_batch(const Config& config, const MeshShape& mesh);

}  // namespace trireme::plan
