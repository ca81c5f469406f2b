#include "trireme/optim/optimizer.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::optim {

std::unique_ptr<Optimizer> build(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  if (config.name == "adamw") return make_adamw(config, std::move(params));
  if (config.name == "sgd") return make_sgd(config, std::move(params));
  throw ConfigError("[optim.build] optim.name '{}' is unknown; choose adamw or sgd", config.name);
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0.0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace trireme::optim
