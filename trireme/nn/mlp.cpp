#include "trireme/nn/mlp.h"

#include "trireme/plan/model_facts.h"

namespace trireme::nn {

MlpBlock::MlpBlock(const plan::ModelConfig& config) {
  norm_ = register_module("norm", std::make_shared<RmsNorm>(config.d_model, config.norm_eps));
  up_ = register_module("up", std::make_shared<Linear>(config.d_model, config.d_ff, false));
  down_ = register_module("down", std::make_shared<Linear>(config.d_ff, config.d_model, false));
}

at::Tensor MlpBlock::forward(const at::Tensor& x) {
  return x + down_->forward(at::silu(up_->forward(norm_->forward(x))));
}

Mlp::Mlp(const plan::ModelConfig& config) {
  tokens_ = register_module("embed", std::make_shared<Embedding>(config.vocab_size, config.d_model));
  const auto list = register_module("blocks", std::make_shared<Namespace>());
  for (int64_t i = 0; i < config.n_layers; ++i) {
    blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<MlpBlock>(config)));
  }
  norm_ = register_module("norm", std::make_shared<RmsNorm>(config.d_model, config.norm_eps));
  if (!config.tie_embeddings) {
    head_ = register_module("lm_head", std::make_shared<Linear>(config.d_model, config.vocab_size, false));
  }
}

std::vector<Unit> Mlp::body(const Documents&) {
  std::vector<Unit> units{
      {plan::kRootUnit, [this](const at::Tensor& tokens) { return tokens_->forward(tokens); }}};
  for (size_t i = 0; i < blocks_.size(); ++i) {
    units.push_back(
        {"blocks." + std::to_string(i), [this, i](const at::Tensor& x) { return blocks_[i]->forward(x); }});
  }
  return units;
}

LanguageModel::Head Mlp::head() {
  return {.norm = [this](const at::Tensor& x) { return norm_->forward(x); },
          .weight = head_ ? head_->weight : tokens_->weight,
          .tied = head_ == nullptr};
}

}  // namespace trireme::nn
