#pragma once
// Memory that is not there: known before a run begins, or met in its course; both end with exit code 4 and
// say what to change.
#include <exception>

#include "trireme/comm/world.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// Throws OutOfMemory when a rank's model state and activations are predicted to be more than its GPU has, or
/// those of the ranks of this host more than the host.
void check_enough_memory(const TrainOptions& run, const comm::World& world);

/// Whether torch's allocator for the host, or the heap, had no memory to give. Memory of GPUs has a type of
/// its own, c10::OutOfMemoryError.
bool is_out_of_host_memory(const std::exception& error);

}  // namespace trireme::train
