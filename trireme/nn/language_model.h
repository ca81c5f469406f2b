#pragma once
// What all models share: tokens in, logits out, and blocks that run through an interface, so that an engine
// can gather and free their parameters around them while the model knows nothing of it.
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>

#include "trireme/plan/config.h"

namespace trireme::nn {

using BlockForward = std::function<at::Tensor(const at::Tensor&)>;
/// Called by the model to run `unit`, a block or an untied head, on x. Returns forward(x), which for the head
/// is logits or the loss; an engine unshards the unit's parameters before and reshards them after. `forward`
/// may be copied, and called again in backward, as long as the model lives.
using UnitRunner =
    std::function<at::Tensor(const std::string& unit, const at::Tensor& x, const BlockForward& forward)>;

inline constexpr int64_t kLossChunkBytes = int64_t{1} << 30;

class LanguageModel : public torch::nn::Module {
 public:
  /// tokens (B, T) int64 -> logits (B, T, V) in the dtype of the parameters.
  at::Tensor forward(const at::Tensor& tokens);

  /// Mean cross-entropy in nats of targets (B, T) int64 -> scalar fp32; the options are those of
  /// linear_cross_entropy(), which computes it on a GPU.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets, int64_t chunk_bytes = kLossChunkBytes,
                  double gradient_scale = 1.0);

  void set_unit_runner(UnitRunner runner) { runner_ = std::move(runner); }
  /// Block 0 and every `every`-th after it compute outputs of norms and activations again in backward instead
  /// of keeping them; 0: no block does.
  void recompute_cheap(int64_t every) { cheap_every_ = every; }

 protected:
  /// tokens (B, T) -> output of the last block (B, T, D).
  virtual at::Tensor hidden(const at::Tensor& tokens) = 0;
  /// The final norm of hidden()'s result, which the head turns into logits.
  virtual at::Tensor normed(const at::Tensor& x) = 0;
  /// (V, D)
  virtual const at::Tensor& head() const = 0;
  virtual bool head_is_tied() const = 0;

  bool recomputes_cheap(size_t block) const {
    return cheap_every_ > 0 && block % static_cast<size_t>(cheap_every_) == 0;
  }
  at::Tensor run_unit(const std::string& unit, const at::Tensor& x, const BlockForward& forward) const {
    return runner_ ? runner_(unit, x, forward) : forward(x);
  }

 private:
  at::Tensor run_head(const at::Tensor& x, const BlockForward& forward) const;

  UnitRunner runner_;
  int64_t cheap_every_ = 0;
};

/// The model that `config` describes, parameters uninitialised, fp32, on the CPU. `config` is complete
/// (plan::complete). Parameter names and shapes are those of plan::describe.
std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config);

}  // namespace trireme::nn
