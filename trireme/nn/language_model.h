#pragma once
// Models of text: tokens to logits or the loss.
#include <functional>
#include <memory>
#include <vector>

#include "trireme/nn/model.h"
#include "trireme/plan/config.h"

namespace trireme::nn {

class LanguageModel : public Model {
 public:
  /// In forward order: the embedding, tokens (B, T) int64 -> (B, T, D); the blocks, (B, T, D) -> (B, T, D);
  /// the head, (B, T, D) -> logits (B, T, V), all in the dtype of the parameters.
  std::vector<Unit> units_in(const Documents& documents) override;
  /// As units(), with the head as the loss: (B, T, D) -> mean cross-entropy in nats, scalar fp32.
  std::vector<Unit> units(const LossTarget& target) override;
  using Model::units;
  /// The head of units() without its product, which may run elsewhere: (B, T, D) -> (B, T, D), with the
  /// parameters of the norm as a unit of their own.
  Unit final_norm();
  at::Tensor head_weight() { return head().weight; }  ///< (V, D)

 protected:
  struct Head {
    UnitForward norm;   ///< of the last block's output
    at::Tensor weight;  ///< (V, D)
    bool tied = false;  ///< norm and weight belong to the unit of the embedding
  };
  /// The embedding and the blocks. Their functions keep `documents`: passes of other ones may be under way.
  virtual std::vector<Unit> body(const Documents& documents) = 0;
  virtual Head head() = 0;

 private:
  using LastStep = std::function<at::Tensor(const at::Tensor& normed, const at::Tensor& weight)>;
  std::vector<Unit> with_head(const Documents& documents, const LastStep& last);
};

/// The model that `config` describes, parameters uninitialised, fp32, on the CPU. `config` is complete
/// (plan::complete). Parameter names and shapes are those of plan::describe.
std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config);

}  // namespace trireme::nn
