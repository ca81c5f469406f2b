#include "trireme/nn/language_model.h"

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/gpt2.h"
#include "trireme/nn/llama.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/mlp.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {

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
  if (config.family == "gpt2") return std::make_shared<Gpt2>(config);
  if (config.family == "llama") return std::make_shared<Llama>(config);
  if (config.family == "mlp") return std::make_shared<Mlp>(config);
  throw ConfigError("[nn.build] model.family '{}' is unknown; choose gpt2, llama or mlp", config.family);
}

}  // namespace trireme::nn
