#include "trireme/nn/init.h"

#include <ATen/Parallel.h>
#include <torch/nn/module.h>

#include <cmath>
#include <numbers>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

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

/// A standard normal number for 64 random bits (Box and Muller 1958).
double standard_normal(uint64_t bits) {
  constexpr double kUnit = 1.0 / 4294967296.0;
  const double u = (static_cast<double>(bits >> 32) + 0.5) * kUnit;
  const double v = (static_cast<double>(bits & 0xffffffffu) + 0.5) * kUnit;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace

void initial_values(const plan::ModelConfig& config, uint64_t seed, const std::string& name, int64_t first,
                    std::span<float> out) {
  if (ends_with(name, "bias") || is_norm(name)) {
    std::fill(out.begin(), out.end(), ends_with(name, "bias") ? 0.0f : 1.0f);
    return;
  }
  double deviation = std::sqrt(2.0 / (5.0 * static_cast<double>(config.d_model)));
  if (ends_residual_branch(name)) deviation /= std::sqrt(2.0 * static_cast<double>(config.n_layers));
  const uint64_t key = xxh3(name, seed);
  at::parallel_for(0, static_cast<int64_t>(out.size()), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t bits = mix64(key, static_cast<uint64_t>(first + i));
      out[static_cast<size_t>(i)] = static_cast<float>(deviation * standard_normal(bits));
    }
  });
}

void initialize(torch::nn::Module& module, const plan::ModelConfig& config, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& entry : module.named_parameters()) {
    const at::Tensor& param = entry.value();
    TRIREME_CHECK(param.device().is_cpu() && param.scalar_type() == at::kFloat && param.is_contiguous(),
                  "[nn.initialize] parameter {} is not a contiguous fp32 CPU tensor", entry.key());
    initial_values(config, seed, entry.key(), 0,
                   {param.data_ptr<float>(), static_cast<size_t>(param.numel())});
  }
}

}  // namespace trireme::nn
