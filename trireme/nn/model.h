#pragma once
// The base of all models: a sequence of units, each a function of one tensor, from inputs to outputs or the
// loss. Units run through an interface, so that an engine can gather and free their parameters around them
// while the model knows nothing of it.
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trireme/nn/attention.h"
#include "trireme/nn/context.h"
#include "trireme/nn/documents.h"
#include "trireme/nn/fp8_history.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/joint.h"

namespace trireme::nn {

using UnitForward = std::function<at::Tensor(const at::Tensor&)>;

/// A block, the layers before the first one, or the head.
struct Unit {
  std::string
      name;  ///< as in the units of the model's record; a tied head, which they lack, is kHeadUnit, too
  UnitForward forward;         ///< may be copied, and called again in backward, as long as the model lives
  bool draws = false;          ///< random numbers, for dropout
  bool has_parameters = true;  ///< false: a tied head, whose parameters are the first unit's
  /// For a block, the two functions that forward calls one after the other; a model may be cut between them.
  UnitForward attention = {}, mlp = {};
  /// The function that backward calls to compute the unit again, where forward also changes something that
  /// must not change twice, such as running statistics, or ends with a product that backward does not need:
  /// the values it returns may be any. Empty: forward.
  UnitForward again = {};
  /// For a block with attention: forward, or `again` if the output is kUnread; the first call keeps
  /// attention's output for the second.
  std::function<at::Tensor(const at::Tensor& x, Output output, KeptAttention& kept)> keeping = {};
};

/// Called by the model to run a unit that has parameters on x; returns unit.forward(x). `begins_pass`: it is
/// the first one of Model::run(). An engine unshards the unit's parameters before and reshards them after.
using UnitRunner = std::function<at::Tensor(const Unit& unit, const at::Tensor& x, bool begins_pass)>;

inline constexpr int64_t kLossChunkBytes = int64_t{1} << 30;

/// Makes the head a loss. The options are those of linear_cross_entropy(), which computes a language model's
/// loss on a GPU.
struct LossTarget {
  at::Tensor targets;  ///< int64: (B, T) of tokens, or (B) of images
  int64_t chunk_bytes = kLossChunkBytes;
  double gradient_scale = 1.0;
  Documents documents = {};  ///< of tokens: kept apart in attention
};

/// How a block computes.
struct BlockOptions {
  bool recompute_cheap = false;  ///< compute outputs of norms and activations again in backward
  std::optional<Fp8Recipe> fp8 = {};
  Output output = Output::kRead;  ///< kUnread: the last product is left out where nothing follows it
  KeptAttention* attention = nullptr;
  JointPtr joint = {};      ///< where layers are cut over ranks
  ContextPtr context = {};  ///< where sequences are
  Documents documents = {};

  std::optional<Fp8Recipe> fp8_of(BlockLayer layer) const {
    std::optional<Fp8Recipe> recipe = fp8;
    if (recipe) recipe->layer = recipe->layer.at(layer);
    return recipe;
  }
};

class Model : public torch::nn::Module {
 public:
  /// In forward order: what comes before the blocks, the blocks, the head, which gives logits (B, ..., V),
  /// all in the dtype of the parameters. Models that attend keep documents apart.
  virtual std::vector<Unit> units_in(const Documents& documents) = 0;
  std::vector<Unit> units() { return units_in(Documents()); }
  /// As units(), with the head as the loss: mean cross-entropy in nats, scalar fp32.
  virtual std::vector<Unit> units(const LossTarget& target) = 0;
  /// Runs units of this model one after another on x, all or a range of them, through the runner.
  at::Tensor run(std::span<const Unit> units, at::Tensor x) const;

  /// inputs (B, ...) -> logits (B, ..., V)
  at::Tensor forward(const at::Tensor& inputs, const Documents& documents = {}) {
    return run(units_in(documents), inputs);
  }
  /// inputs (B, ...) -> mean cross-entropy in nats of targets, scalar fp32
  at::Tensor loss(const at::Tensor& inputs, const LossTarget& target) { return run(units(target), inputs); }
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& targets, int64_t chunk_bytes = kLossChunkBytes,
                  double gradient_scale = 1.0) {
    return loss(inputs, LossTarget{targets, chunk_bytes, gradient_scale});
  }

  /// Without a runner units run by themselves.
  void set_unit_runner(UnitRunner runner) { runner_ = std::move(runner); }
  const UnitRunner& unit_runner() const { return runner_; }
  /// The parameters are those of one rank of several (plan::split_model): activations between blocks are its
  /// rows, as joint.h has them, tokens and targets those of all. For language models with attention.
  void set_joint(JointPtr joint) { joint_ = std::move(joint); }
  /// Tokens and targets are those that this rank has of each sequence, T / n of them. For language models
  /// with attention.
  void set_context(ContextPtr context) { context_ = std::move(context); }
  /// Block 0 and every `every`-th after it compute outputs of norms and activations again in backward instead
  /// of keeping them; 0: no block does. Models whose record says that nothing is cheap ignore it.
  void recompute_cheap(int64_t every) { cheap_every_ = every; }
  /// The linear layers of the blocks for which `blocks` is true are multiplied in FP8 while the model trains;
  /// in evaluation they are not, so that inputs may have any number of rows. Models whose record has no such
  /// layers ignore it. `history`, which must outlive passes, delays scales; nullptr: they are dynamic.
  /// `head`: the head of a language model is multiplied in FP8, too, where it is a loss, with dynamic scales.
  void use_fp8(const Fp8Recipe& recipe, std::function<bool(int64_t block)> blocks,
               const Fp8History* history = nullptr, bool head = false) {
    fp8_ = recipe;
    fp8_head_ = head;
    fp8_blocks_ = std::move(blocks);
    fp8_history_ = history;
  }

 protected:
  BlockOptions block_options(size_t block, const Documents& documents, Output output = Output::kRead,
                             KeptAttention* attention = nullptr) const;
  const JointPtr& joint() const { return joint_; }
  /// The length T of the whole sequences of which a block gets x (B, T', D).
  int64_t length_of(const at::Tensor& x) const {
    return x.size(1) * (joint_ ? joint_->size() : 1) * (context_ ? context_->size() : 1);
  }
  /// Where the `length` tokens that this rank has of a sequence lie in it.
  std::vector<plan::Range> positions(int64_t length) const {
    return context_ ? context_->tokens().ranges(length * context_->size())
                    : std::vector{plan::Range{0, length}};
  }
  /// How the head is multiplied; none: in the dtype of its weight.
  std::optional<Fp8Recipe> head_fp8() const { return is_training() && fp8_head_ ? fp8_ : std::nullopt; }

 private:
  UnitRunner runner_;
  int64_t cheap_every_ = 0;
  std::optional<Fp8Recipe> fp8_;
  std::function<bool(int64_t)> fp8_blocks_;
  const Fp8History* fp8_history_ = nullptr;
  bool fp8_head_ = false;
  JointPtr joint_;
  ContextPtr context_;
};

}  // namespace trireme::nn
