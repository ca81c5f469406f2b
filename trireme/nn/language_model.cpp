#include "trireme/nn/language_model.h"

#include <iterator>

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/gpt2.h"
#include "trireme/nn/llama.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/mlp.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {
namespace {

template <typename Model>
std::shared_ptr<LanguageModel> make(const plan::ModelConfig& config) {
  return std::make_shared<Model>(config);
}

struct Factory {
  plan::ModelFamily family;
  std::shared_ptr<LanguageModel> (*make)(const plan::ModelConfig& config);
};

constexpr Factory kFactories[] = {{plan::ModelFamily::kGpt2, make<Gpt2>},
                                  {plan::ModelFamily::kLlama, make<Llama>},
                                  {plan::ModelFamily::kMlp, make<Mlp>}};
static_assert(std::size(kFactories) == plan::kNames<plan::ModelFamily>.size());

}  // namespace

at::Tensor LanguageModel::run_head(const at::Tensor& x, const BlockForward& forward) const {
  return head_is_tied() ? forward(x) : run_unit(plan::kHeadUnit, x, forward);
}

at::Tensor LanguageModel::forward(const at::Tensor& tokens) {
  return run_head(hidden(tokens), [this](const at::Tensor& x) { return nn::linear(normed(x), head(), {}); });
}

at::Tensor LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets, int64_t chunk_bytes,
                               double gradient_scale) {
  return run_head(hidden(tokens), [this, targets, chunk_bytes, gradient_scale](const at::Tensor& in) {
    const at::Tensor x = normed(in);
    return x.is_cuda() ? linear_cross_entropy(x, head(), targets, chunk_bytes, gradient_scale)
                       : cross_entropy(nn::linear(x, head(), {}), targets);
  });
}

std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config) {
  for (const Factory& factory : kFactories) {
    if (factory.family == config.family) return factory.make(config);
  }
  throw LogicError("[nn.build] family {} has no factory", static_cast<int>(config.family));
}

}  // namespace trireme::nn
