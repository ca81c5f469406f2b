#pragma once
// Whether the passes of a run can be recorded as CUDA graphs: what the config alone says about it.
#include <cstdint>
#include <string>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// Steps that run before anything is recorded: libraries make their handles and plans in them.
inline constexpr int64_t kStepsBeforeRecording = 3;

/// Why train.cuda_graphs cannot be honoured for `config` with so many data-parallel ranks, on a GPU or not;
/// empty when it can. A recording repeats kernels on the same memory with the same numbers, so nothing in a
/// pass may wait for other ranks, come from the host, or lie elsewhere in the next step.
std::string cuda_graphs_obstacle(const Config& config, bool gpu, int64_t ranks);

}  // namespace trireme::plan
