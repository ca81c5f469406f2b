#pragma once
// The batch equation: global_batch = micro_batch x accumulation x data-parallel ranks.
#include <cstdint>

namespace trireme::plan {

struct BatchPlan {
  int64_t global_batch = 0;
  int64_t micro_batch = 0;
  int64_t accumulation = 0;  ///< forward/backward passes per optimizer step
  int64_t dp_size = 0;
};

/// Solves for the accumulation; micro_batch = 0 means one pass. Throws ConfigError that prints the equation
/// with all numbers and the nearest valid settings.
BatchPlan plan_batch(int64_t global_batch, int64_t micro_batch, int64_t dp_size);

}  // namespace trireme::plan
