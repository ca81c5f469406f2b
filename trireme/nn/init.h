#pragma once
// Initial weights as a pure function of (seed, parameter name, element index): any rank can fill any region
// of any parameter, so every layout starts from the same weights.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trireme/plan/model_facts.h"

namespace torch::nn {
class Module;
}

namespace trireme::nn {

/// The elements of a region of the whole parameter `param` into `out`: (region.numel()) fp32, contiguous, on
/// any device, which changes no bits.
void initial_values(const plan::ParamSpec& param, uint64_t seed, const plan::Region& region, at::Tensor& out);

/// The initial weights of a model by parameter name, as its record in plan/ has them. May be
/// handed to the engine as its initializer.
class InitialWeights {
 public:
  InitialWeights(const plan::ModelConfig& config, uint64_t seed);
  /// The initial weights of any model, from its units.
  InitialWeights(const std::vector<plan::UnitSpec>& units, uint64_t seed);

  /// As initial_values(). Throws LogicError for a name that the model does not have.
  void operator()(const std::string& name, const plan::Region& region, at::Tensor& out) const;

  /// Fills every parameter of an fp32 module.
  void fill(torch::nn::Module& module) const;

 private:
  std::map<std::string, plan::ParamSpec> params_;
  uint64_t seed_;
};

}  // namespace trireme::nn
