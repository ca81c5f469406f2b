#pragma once
// Llama (Touvron et al. 2023; Llama 3, 2024): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no
// biases; names of Hugging Face's LlamaForCausalLM.
#include <memory>
#include <vector>

#include "trireme/nn/attention.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/layers.h"

namespace trireme::nn {

class LlamaBlock : public torch::nn::Module {
 public:
  /// `config` is complete (plan::complete). Parameters are uninitialised, fp32, on the CPU.
  explicit LlamaBlock(const plan::ModelConfig& config);
  /// (B, T, D) -> (B, T, D)
  at::Tensor forward(const at::Tensor& x, const RopeTable& rope, const BlockOptions& options = {});
  /// Its two halves, (B, T, D) -> (B, T, D) each.
  at::Tensor attention(const at::Tensor& x, const RopeTable& rope, const BlockOptions& options);
  at::Tensor mlp(const at::Tensor& x, const BlockOptions& options) { return feed_forward(x, {}, options); }

 private:
  /// x, and what attention adds to it.
  std::pair<at::Tensor, at::Tensor> attend(const at::Tensor& x, const RopeTable& rope,
                                           const BlockOptions& options);
  at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& attended, const BlockOptions& options);

  AttentionShape shape_;
  std::shared_ptr<RmsNorm> input_norm_, mlp_norm_;
  std::shared_ptr<Linear> query_, key_, value_, output_, gate_, up_, down_;
};

class Llama : public LanguageModel {
 public:
  /// `config` is complete (plan::complete), of family llama. Parameters are uninitialised, fp32, on the CPU.
  explicit Llama(const plan::ModelConfig& config);

 private:
  std::vector<Unit> body(const Documents& documents) override;
  Head head() override;
  const RopeTable& rope(int64_t length, at::Device device);

  int64_t head_dim_;
  double theta_;
  RopeStretch stretch_;
  bool draws_;  ///< in a block, in training
  RopeTable rope_;
  std::shared_ptr<Embedding> tokens_;
  std::vector<std::shared_ptr<LlamaBlock>> blocks_;
  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Linear> head_;  ///< null: tied to the token embedding
};

}  // namespace trireme::nn
