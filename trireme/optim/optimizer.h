#pragma once
// Optimizers over flat fp32 ranges. They know neither modules nor ranks: a range may be a whole parameter, a
// unit or one rank's shard of it.
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::optim {

/// Factors on the optimizer's settings for a group of parameters: layer-wise rates, no decay on biases.
struct Group {
  double lr_factor = 1.0;
  double decay_factor = 1.0;  ///< 0: no weight decay
  bool operator==(const Group&) const = default;
};
/// Weight decay for matrices only, not for biases and the gains of norms.
Group decay_matrices(const std::string& name, at::IntArrayRef shape);

/// A range of a flat buffer and the group that it belongs to. Where optimizers keep their state in fewer bits
/// than fp32 (plan::OptimState), it is of one parameter: `key` and `first` decide how it is rounded, and its
/// first element lies at a multiple of 8 in the buffer and in the parameter.
struct Segment {
  plan::Range range;
  Group group = {};
  uint64_t key = 0;   ///< of the parameter, the same on all ranks
  int64_t first = 0;  ///< its first element's place in the parameter
};

/// The segment's part of a flat tensor; undefined for an undefined one.
at::Tensor part_of(const at::Tensor& flat, const Segment& segment);

/// `segments` with neighbours of the same group joined, which saves a kernel call for each.
std::vector<Segment> merged(const std::vector<Segment>& segments);

/// A flat range of fp32 masters with its gradients, which an optimizer updates on this rank.
struct FlatParam {
  at::Tensor master;  ///< (n) fp32, updated in place
  at::Tensor grad;    ///< (n) fp32, or the dtype of `copy`
  at::Tensor copy;    ///< (n) bf16, on GPUs also fp16, that receives the updated values; undefined: none
  std::vector<Segment> segments;  ///< cover what belongs to parameters; padding is left out
};

/// The factor on gradients in the update: the clip factor divided by the scale of the loss.
struct GradScale {
  GradScale(double factor = 1.0) : host(factor) {}  // NOLINT: a number is a scale
  double host;
  at::Tensor device = {};  ///< a second factor, an fp32 scalar on the device; undefined: 1
};

/// Updates the flat ranges that it was made for. Made by adamw(), sgd() or build().
class Optimizer {
 public:
  explicit Optimizer(double lr) : lr_(lr) {}
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// The learning rate of the next update.
  double lr() const { return lr_; }
  void set_lr(double lr) { lr_ = lr; }

  /// To be called before each step; then update() once for every parameter, in any order.
  virtual void begin_step() = 0;
  /// Updates parameter `index` of those given to build(); its gradient is multiplied by `grad_scale` first.
  /// On a GPU the work is enqueued on the current stream.
  virtual void update(size_t index, const GradScale& grad_scale) = 0;
  /// How many parameters (FlatParam) it was made for.
  virtual size_t size() const = 0;
  /// FlatParam::master of parameter `index`.
  virtual const at::Tensor& master(size_t index) const = 0;
  /// A whole step.
  void step(const GradScale& grad_scale = {}) {
    begin_step();
    for (size_t i = 0; i < size(); ++i) update(i, grad_scale);
  }
  /// From now on only these parts of parameter `index` are updated. Parts given to build() that are frozen
  /// meanwhile may be missing.
  virtual void set_segments(size_t index, std::vector<Segment> segments) = 0;
  /// Exchanges the values of parameter `index` with their average over the steps so far
  /// (plan::OptimConfig::ema); does nothing before the first step. On a GPU the work is enqueued on the
  /// current stream. Throws LogicError where no averages are kept.
  virtual void swap_average(size_t index) = 0;
  /// Bytes of optimizer state that this rank holds.
  virtual int64_t state_bytes() const = 0;
  /// Names of the numbers that the optimizer keeps for every element, as in its record, such as "exp_avg".
  virtual std::vector<std::string_view> state_names() const = 0;
  /// State `number`, counted in state_names(), of the elements `range` of parameter `index`: (elements of the
  /// range) fp32, the state itself where that is fp32, else a copy. Before the first step moments are zeros
  /// and averages the masters.
  virtual at::Tensor state(size_t index, size_t number, const plan::Range& range) const = 0;
  /// Replaces that state by `values` (elements of the range) fp32, rounded where it has fewer bits; values
  /// that state() returned are restored exactly.
  virtual void set_state(size_t index, size_t number, const plan::Range& range, const at::Tensor& values) = 0;
  /// How many steps were begun.
  virtual int64_t steps() const = 0;
  /// To be called with set_state(), between steps: the next step is number `steps` + 1, by which AdamW
  /// corrects its moments.
  virtual void set_steps(int64_t steps) = 0;

 private:
  double lr_;
};

/// As torch.optim.AdamW has it, defaults included; `state`: how the moments are kept.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  plan::OptimState state = plan::OptimState::kFp32;
};
/// Decoupled weight decay (Loshchilov and Hutter, 2019). Steps are counted for all parameters together, where
/// torch counts them for each: a parameter whose first update comes late, since it was frozen until then,
/// begins with moments of zero and the bias corrections of a late step. With the default betas its first
/// updates are then up to 6.6 times as large as in torch.
std::unique_ptr<Optimizer> adamw(std::vector<FlatParam> params, const AdamWOptions& options = {});

/// As torch.optim.SGD has it, defaults included; `state`: how momentum is kept.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;  ///< the gradient is looked at where momentum leads (Nesterov 1983)
  plan::OptimState state = plan::OptimState::kFp32;
};
/// Gradient descent with momentum; weight decay is added to the gradient. Throws ConfigError for Nesterov
/// momentum without momentum.
std::unique_ptr<Optimizer> sgd(std::vector<FlatParam> params, const SgdOptions& options = {});

/// The optimizer that `config.name` says, with the state of its record in plan/optimizer.h.
std::unique_ptr<Optimizer> build(const plan::OptimConfig& config, std::vector<FlatParam> params);

/// Factor that brings `norm` down to `max_norm`, 1 when it is below or max_norm is 0: min(1, max_norm / (norm
/// + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it. NaN for a norm that is NaN.
double clip_factor(double norm, double max_norm);
/// The clip factor on a device: norm fp64 scalar -> fp32 scalar. The host does not wait.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

}  // namespace trireme::optim
