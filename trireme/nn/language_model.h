#pragma once
// What all models share: a sequence of units, each a function of one tensor, from tokens to logits or the
// loss. Units run through an interface, so that an engine can gather and free their parameters around them
// while the model knows nothing of it.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::nn {

using UnitForward = std::function<at::Tensor(const at::Tensor&)>;

/// The embedding, a block, or the head.
struct Unit {
  std::string name;     ///< as in plan::ModelFacts::units; a tied head, which they lack, is kHeadUnit, too
  UnitForward forward;  ///< may be copied, and called again in backward, as long as the model lives
  bool draws = false;   ///< random numbers, for dropout
  bool has_parameters = true;  ///< false: a tied head, whose parameters are the first unit's
  /// Of a block: the two functions that forward does one after the other, where a model may be cut in two.
  UnitForward attention = {}, mlp = {};
};

/// Called by the model to run a unit that has parameters on x; returns unit.forward(x). `begins_pass`: it is
/// the first one of LanguageModel::run(). An engine unshards the unit's parameters before and reshards them
/// after.
using UnitRunner = std::function<at::Tensor(const Unit& unit, const at::Tensor& x, bool begins_pass)>;

inline constexpr int64_t kLossChunkBytes = int64_t{1} << 30;

/// What makes the head a loss; the options are those of linear_cross_entropy(), which computes it on a GPU.
struct LossTarget {
  at::Tensor targets;  ///< (B, T) int64
  int64_t chunk_bytes = kLossChunkBytes;
  double gradient_scale = 1.0;
};

class LanguageModel : public torch::nn::Module {
 public:
  /// In forward order: the embedding, tokens (B, T) int64 -> (B, T, D); the blocks, (B, T, D) -> (B, T, D);
  /// the head, (B, T, D) -> logits (B, T, V), all in the dtype of the parameters.
  std::vector<Unit> units();
  /// The same with the head as the loss: (B, T, D) -> mean cross-entropy in nats, scalar fp32.
  std::vector<Unit> units(const LossTarget& target);
  /// Runs units of this model one after another on x, all or a range of them, through the runner.
  at::Tensor run(std::span<const Unit> units, at::Tensor x) const;

  /// tokens (B, T) int64 -> logits (B, T, V)
  at::Tensor forward(const at::Tensor& tokens) { return run(units(), tokens); }
  /// tokens (B, T) int64 -> mean cross-entropy in nats of targets (B, T) int64, scalar fp32
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, int64_t chunk_bytes = kLossChunkBytes,
                  double gradient_scale = 1.0) {
    return run(units({targets, chunk_bytes, gradient_scale}), tokens);
  }

  /// None: units run by themselves.
  void set_unit_runner(UnitRunner runner) { runner_ = std::move(runner); }
  const UnitRunner& unit_runner() const { return runner_; }
  /// Block 0 and every `every`-th after it compute outputs of norms and activations again in backward instead
  /// of keeping them; 0: no block does.
  void recompute_cheap(int64_t every) { cheap_every_ = every; }

 protected:
  struct Head {
    UnitForward norm;   ///< of the last block's output
    at::Tensor weight;  ///< (V, D)
    bool tied = false;  ///< norm and weight belong to the unit of the embedding
  };
  /// The embedding and the blocks.
  virtual std::vector<Unit> body() = 0;
  virtual Head head() = 0;

  bool recomputes_cheap(size_t block) const {
    return cheap_every_ > 0 && block % static_cast<size_t>(cheap_every_) == 0;
  }

 private:
  using LastStep = std::function<at::Tensor(const at::Tensor& normed, const at::Tensor& weight)>;
  std::vector<Unit> with_head(const LastStep& last);

  UnitRunner runner_;
  int64_t cheap_every_ = 0;
};

/// The model that `config` describes, parameters uninitialised, fp32, on the CPU. `config` is complete
/// (plan::complete). Parameter names and shapes are those of plan::describe.
std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config);

}  // namespace trireme::nn
