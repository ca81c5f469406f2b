#pragma once
// What it costs to compute activations again, and whether that pays by default.
#include "trireme/plan/config.h"

namespace trireme::plan {

/// By what share memory.recompute=cheap lengthens a step on a GPU, predicted from the bytes that it moves in
/// addition; infinite where the model's record says that nothing is cheap.
double cheap_cost(const Config& config);

/// FLOPs of the matrix products, attention's included, that backward computes again for a token, or for an
/// image; the products of forward and backward are ModelFacts::flops_per_token. memory.recompute of `config`
/// is settled; cheap repeats none.
double repeated_flops(const Config& config);

/// `config` with memory.recompute decided where it is auto: cheap on a GPU when cheap_cost() is below 1% and
/// nothing is multiplied in FP8, else none. `device` is kCpu or kCuda.
Config settle_recompute(Config config, Device device);

}  // namespace trireme::plan
