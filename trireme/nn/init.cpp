#include "trireme/nn/init.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::nn {
namespace {

bool ends_with(const std::string& text, std::string_view tail) {
  return std::string_view(text).ends_with(tail);
}

bool is_norm(const std::string& name) {
  return name.find("norm") != std::string::npos || name.find(".ln_") != std::string::npos;
}

bool ends_residual_branch(const std::string& name) {
  return ends_with(name, "c_proj.weight") || ends_with(name, "o_proj.weight") ||
         ends_with(name, "down_proj.weight") || ends_with(name, "down.weight");
}

}  // namespace

void initial_values(const plan::ModelConfig& config, uint64_t seed, const std::string& name, int64_t first,
                    at::Tensor& out) {
  if (ends_with(name, "bias") || is_norm(name)) {
    out.fill_(ends_with(name, "bias") ? 0.0 : 1.0);
    return;
  }
  double deviation = std::sqrt(2.0 / (5.0 * static_cast<double>(config.d_model)));
  if (ends_residual_branch(name)) deviation /= std::sqrt(2.0 * static_cast<double>(config.n_layers));
  kernels::fill_normal(out, xxh3(name, seed), first, deviation);
}

void initialize(torch::nn::Module& module, const plan::ModelConfig& config, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& param = entry.value();
    TRIREME_CHECK(param.scalar_type() == at::kFloat && param.is_contiguous(),
                  "[nn.initialize] parameter {} is not a contiguous fp32 tensor", entry.key());
    at::Tensor flat = param.view({-1});
    initial_values(config, seed, entry.key(), 0, flat);
  }
}

}  // namespace trireme::nn
