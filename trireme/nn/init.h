#pragma once
// Initial weights as a pure function of (seed, parameter name, element index): any rank can fill any range of
// any parameter, so every layout starts from the same weights.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "trireme/plan/config.h"

namespace torch::nn {
class Module;
}

namespace trireme::nn {

/// Elements [first, first + out.numel()) of the parameter `name`, counted in row-major order, into `out`:
/// fp32, contiguous, on any device, which changes no bits. Norm weights are 1, biases 0, matrices normal with
/// standard deviation sqrt(2 / (5 d_model)), which is 0.02 at width 1000 (Nguyen and Salazar 2019); those
/// that end a residual branch are divided by sqrt(2 n_layers) (Radford et al. 2019).
void initial_values(const plan::ModelConfig& config, uint64_t seed, const std::string& name, int64_t first,
                    at::Tensor& out);

/// Fills every parameter of an fp32 module.
void initialize(torch::nn::Module& module, const plan::ModelConfig& config, uint64_t seed);

}  // namespace trireme::nn
