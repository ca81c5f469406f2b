#pragma once
// GPT-2 (Radford et al. 2019): pre-norm blocks with LayerNorm, learned positions and GELU; names and the (in,
// out) weights of Hugging Face's GPT2LMHeadModel.
#include <memory>
#include <vector>

#include "trireme/nn/language_model.h"
#include "trireme/nn/layers.h"

namespace trireme::nn {

class Gpt2Block : public torch::nn::Module {
 public:
  /// `config` is complete (plan::complete). Parameters are uninitialised, fp32, on the CPU.
  explicit Gpt2Block(const plan::ModelConfig& config);
  /// (B, T, D) -> (B, T, D)
  at::Tensor forward(const at::Tensor& x, const BlockOptions& options = {});
  /// Its two halves, (B, T, D) -> (B, T, D) each.
  at::Tensor attention(const at::Tensor& x, const BlockOptions& options);
  at::Tensor mlp(const at::Tensor& x, const BlockOptions& options) { return feed_forward(x, {}, options); }

 private:
  /// x, and what attention adds to it.
  std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& x, const BlockOptions& options);
  at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& attended, const BlockOptions& options);
  bool drops() const;
  at::Tensor dropped(const at::Tensor& x) const;

  AttentionShape shape_;
  double dropout_;
  std::shared_ptr<LayerNorm> ln_1_, ln_2_;
  std::shared_ptr<Linear> attention_in_, attention_out_, up_, down_;
};

class Gpt2 : public LanguageModel {
 public:
  /// `config` is complete (plan::complete), of family gpt2. Parameters are uninitialised, fp32, on the CPU. A
  /// forward pass throws LogicError for sequences longer than config.max_seq_len.
  explicit Gpt2(const plan::ModelConfig& config);

 private:
  std::vector<Unit> body(const Documents& documents) override;
  Head head() override;
  at::Tensor embedded(const at::Tensor& tokens, const Documents& documents);  // (B, T) -> (B, T, D)
  at::Tensor embedded_places(const at::Tensor& tokens, const Documents& documents);

  double dropout_;
  bool draws_;  ///< in a block, in training
  std::shared_ptr<Embedding> tokens_, positions_;
  std::vector<std::shared_ptr<Gpt2Block>> blocks_;
  std::shared_ptr<LayerNorm> norm_;
  std::shared_ptr<Linear> head_;  ///< null: tied to the token embedding
};

}  // namespace trireme::nn
