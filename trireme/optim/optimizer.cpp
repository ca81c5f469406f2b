#include "trireme/optim/optimizer.h"

#include <ATen/ATen.h>

#include <iterator>

#include "trireme/base/error.h"
#include "trireme/optim/flat_optimizer.h"

namespace trireme::optim {
namespace {

struct Factory {
  plan::OptimizerName name;
  std::unique_ptr<Optimizer> (*make)(const plan::OptimConfig& config, std::vector<FlatParam> params);
};

constexpr Factory kFactories[] = {{plan::OptimizerName::kAdamW, make_adamw},
                                  {plan::OptimizerName::kSgd, make_sgd}};
static_assert(std::size(kFactories) == plan::kNames<plan::OptimizerName>.size());

}  // namespace

std::unique_ptr<Optimizer> build(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  for (const Factory& factory : kFactories) {
    if (factory.name == config.name) return factory.make(config, std::move(params));
  }
  throw LogicError("[optim.build] optimizer {} has no factory", static_cast<int>(config.name));
}

std::unique_ptr<Optimizer> adamw(std::vector<FlatParam> params, const AdamWOptions& options) {
  return build({.name = plan::OptimizerName::kAdamW,
                .state = options.state,
                .lr = options.lr,
                .beta1 = options.beta1,
                .beta2 = options.beta2,
                .eps = options.eps,
                .weight_decay = options.weight_decay},
               std::move(params));
}

std::unique_ptr<Optimizer> sgd(std::vector<FlatParam> params, const SgdOptions& options) {
  if (options.nesterov && options.momentum == 0.0)
    throw ConfigError(
        "[optim.sgd] Nesterov momentum needs momentum > 0, but it is 0; raise momentum or set nesterov to "
        "false");
  return build({.name = plan::OptimizerName::kSgd,
                .state = options.state,
                .lr = options.lr,
                .momentum = options.momentum,
                .nesterov = options.nesterov,
                .weight_decay = options.weight_decay},
               std::move(params));
}

Group decay_matrices(const std::string&, at::IntArrayRef shape) {
  return {.decay_factor = shape.size() >= 2 ? 1.0 : 0.0};
}

at::Tensor part_of(const at::Tensor& flat, const Segment& segment) {
  return flat.defined() ? flat.narrow(0, segment.range.begin, segment.range.size()) : at::Tensor();
}

std::vector<Segment> merged(const std::vector<Segment>& segments) {
  std::vector<Segment> result;
  for (const Segment& segment : segments) {
    const bool follows = !result.empty() && result.back().group == segment.group &&
                         result.back().range.end == segment.range.begin;
    if (follows) {
      result.back().range.end = segment.range.end;
    } else {
      result.push_back(segment);
    }
  }
  return result;
}

double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return max_norm > 0.0 && !(factor > 1.0) ? factor : 1.0;
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  if (max_norm <= 0.0) return at::ones({}, norm.options().dtype(at::kFloat));
  return (max_norm / (norm + 1e-6)).clamp_max(1.0).to(at::kFloat);
}

}  // namespace trireme::optim
