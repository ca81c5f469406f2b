#pragma once
// Micro-batches through the stages of a program, in the order of a pipeline schedule.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/gt/tensor.h"

namespace gt {

/// Calls `loss_of` with the number of each micro-batch, and gives workers its forward and backward passes in
/// the order of the schedule (plan/schedule.h: "gpipe", "1f1b", "interleaved_1f1b", "zb_v", ...). Gradients
/// are those of the mean of the losses, which it returns; nothing waits. Throws trireme::ConfigError for
/// schedules whose stages are not those of the file of signals, and losses of other shapes.
std::vector<Tensor> schedule(const std::string& name, int64_t micro_batches,
                             const std::function<Tensor(int64_t micro_batch)>& loss_of,
                             source_location where = source_location::current());

}  // namespace gt
