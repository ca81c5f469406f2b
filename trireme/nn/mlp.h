#pragma once
// A residual MLP over single positions: predicts a token from the one before. The smallest model that trains,
// for tests and for measuring engines without attention.
#include <memory>
#include <vector>

#include "trireme/nn/language_model.h"
#include "trireme/nn/layers.h"

namespace trireme::nn {

class MlpBlock : public torch::nn::Module {
 public:
  /// `config` is complete (plan::complete). Parameters are uninitialised, fp32, on the CPU.
  explicit MlpBlock(const plan::ModelConfig& config);
  /// (B, T, D) -> (B, T, D)
  at::Tensor forward(const at::Tensor& x);

 private:
  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Linear> up_, down_;
};

class Mlp : public LanguageModel {
 public:
  /// `config` is complete (plan::complete), of family mlp. Parameters are uninitialised, fp32, on the CPU.
  explicit Mlp(const plan::ModelConfig& config);

 private:
  std::vector<Unit> body(const Documents& documents) override;
  Head head() override;

  std::shared_ptr<Embedding> tokens_;
  std::vector<std::shared_ptr<MlpBlock>> blocks_;
  std::shared_ptr<RmsNorm> norm_;
  std::shared_ptr<Linear> head_;  ///< null: tied to the token embedding
};

}  // namespace trireme::nn
