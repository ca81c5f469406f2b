#pragma once
// Whether it pays to compute activations again by default.
#include "trireme/plan/config.h"

namespace trireme::plan {

/// The share of a step's time that memory.recompute=cheap takes on a GPU, predicted from the bytes that it
/// moves besides; infinite where the model's record says that nothing is cheap.
double cheap_cost(const Config& config);

/// `config` with memory.recompute decided where it is auto: cheap on a GPU whose steps it makes longer by
/// less than 1%, else none. `device` is kCpu or kCuda.
Config settle_recompute(Config config, Device device);

}  // namespace trireme::plan
