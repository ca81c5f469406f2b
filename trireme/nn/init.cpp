#include "trireme/nn/init.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::nn {

void initial_values(const plan::ParamSpec& param, uint64_t seed, const plan::Region& region,
                    at::Tensor& out) {
  const plan::Shape& whole = param.part.whole_of(param.shape);
  const std::string misfit = plan::misfit(region, whole);
  TRIREME_CHECK(misfit.empty(), "[nn.init] parameter {}: {}", param.name, misfit);
  const auto& [mean, deviation] = param.initial;
  if (deviation == 0.0) {
    out.fill_(mean);
    return;
  }
  const uint64_t key = xxh3(param.name, seed);
  for (plan::RunCursor cursor(whole, region); !cursor.done(); cursor.next()) {
    const plan::Run& run = cursor.run();
    at::Tensor part = out.narrow(0, run.local, run.length);
    kernels::fill_normal(part, key, {run.begin}, deviation);
  }
  if (mean != 0.0) out.add_(mean);
}

InitialWeights::InitialWeights(const plan::ModelConfig& config, uint64_t seed)
    : InitialWeights(plan::describe(config, config.max_seq_len).units, seed) {}

InitialWeights::InitialWeights(const std::vector<plan::UnitSpec>& units, uint64_t seed) : seed_(seed) {
  for (const plan::UnitSpec& unit : units) {
    for (const plan::ParamSpec& param : unit.params) params_.emplace(param.name, param);
  }
}

void InitialWeights::operator()(const std::string& name, const plan::Region& region, at::Tensor& out) const {
  const auto found = params_.find(name);
  TRIREME_CHECK(found != params_.end(), "[nn.init] the model description has no parameter {}", name);
  initial_values(found->second, seed_, region, out);
}

void InitialWeights::fill(torch::nn::Module& module) const {
  const at::NoGradGuard no_grad;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& param = entry.value();
    TRIREME_CHECK(param.scalar_type() == at::kFloat && param.is_contiguous(),
                  "[nn.init] parameter {} is not a contiguous fp32 tensor", entry.key());
    at::Tensor flat = param.view({-1});
    (*this)(entry.key(), plan::Region::whole(param.sizes().vec()), flat);
  }
}

}  // namespace trireme::nn
