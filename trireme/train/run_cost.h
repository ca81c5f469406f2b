#pragma once
// What the parallel layout of a run costs a rank in memory and in bytes on the wire: predicted beside
// measured.
#include <cstdint>
#include <optional>

#include "trireme/base/sink.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/train/parts.h"

namespace trireme::train {

/// What this rank has measured, beside what its model knows.
struct MeasuredCost {
  int64_t wire_bytes = 0;                                 ///< sent in a full step
  int64_t copy_bytes = 0;                                 ///< of the copy that checkpoints are written from
  int64_t baseline_bytes = 0;                             ///< as RunCost has it
  std::optional<parallel::CommTimes> communication = {};  ///< in the last step; none: it was not timed
};

/// The cost of a run at its end. Collective.
RunCost run_cost(const Parts& parts, const MeasuredCost& measured);

}  // namespace trireme::train
