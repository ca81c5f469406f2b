#pragma once
// Whether the passes of a run can be recorded as CUDA graphs, as far as the config alone tells.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// Steps that run before anything is recorded: libraries make their handles and plans in them, and all but
/// the first, which is slow, are measured to see whether recording pays.
inline constexpr int64_t kStepsBeforeRecording = 4;

/// Why train.cuda_graphs cannot be honoured for `config` with so many data-parallel ranks, on a GPU or not;
/// empty when it can. Where possible it is read off the step program. A recording repeats kernels on the same
/// memory with the same numbers, so nothing in a pass may wait for other ranks, come from the host, or lie
/// elsewhere in the next step. Ranks reduce gradients beside a launched pass, and gather parameters before
/// it.
std::string cuda_graphs_obstacle(const Config& config, bool gpu, int64_t ranks);

/// Whether a device waits for its host, so that recording pays. A lag is how long the device worked on after
/// the host had enqueued all passes of a step, over the time that this took the host: the last kernels where
/// the device is faster, the rest of the step where the host is. The median of them decides, since a host
/// that loses its core for a moment spoils a single one.
bool device_waits_for_host(std::vector<double> lags);

/// Whether recordings that nobody asked for may take `bytes` more of a GPU with `free_bytes` free: they need
/// memory for activations a second time.
bool may_stay(int64_t bytes, int64_t free_bytes);

}  // namespace trireme::plan
