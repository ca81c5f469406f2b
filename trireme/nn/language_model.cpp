#include "trireme/nn/language_model.h"

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/gpt2.h"
#include "trireme/nn/llama.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/mlp.h"

namespace trireme::nn {

at::Tensor LanguageModel::forward(const at::Tensor& tokens) {
  return nn::linear(hidden(tokens), head(), {});
}

at::Tensor LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets, int64_t chunk_bytes,
                               double gradient_scale) {
  const at::Tensor x = hidden(tokens);
  return x.is_cuda() ? linear_cross_entropy(x, head(), targets, chunk_bytes, gradient_scale)
                     : cross_entropy(nn::linear(x, head(), {}), targets);
}

std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config) {
  if (config.family == "gpt2") return std::make_shared<Gpt2>(config);
  if (config.family == "llama") return std::make_shared<Llama>(config);
  if (config.family == "mlp") return std::make_shared<Mlp>(config);
  throw ConfigError("[nn.build] model.family '{}' is unknown; choose gpt2, llama or mlp", config.family);
}

}  // namespace trireme::nn
