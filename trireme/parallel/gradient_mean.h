#pragma once
// What turns the sums that ranks reduce into the gradient of a step: the mean by weight, and clipping.
#include <ATen/core/Tensor.h>

#include <vector>

#include "trireme/comm/group.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/options.h"

namespace trireme::parallel {

class GradientMean {
 public:
  /// `ranks` are those whose gradients are summed; must outlive this.
  GradientMean(comm::Group& ranks, Average average, c10::Device device)
      : ranks_(ranks), average_(average), device_(device) {}

  /// Throws LogicError for a weight that add() does not take.
  void check(double weight, at::ScalarType loss) const;
  /// A micro-batch of `weight` begins; returns the factor for its loss of dtype `loss`. Ranks divide before
  /// they add, so that sums keep the range of one rank's gradient. bf16 and fp16 round the factor, so the
  /// mean counts the weight that is left of it.
  double add(double weight, at::ScalarType loss = at::kFloat);
  /// What the loss of a micro-batch of `weight` is multiplied by before it is differentiated.
  double factor_of(double weight, at::ScalarType loss = at::kFloat) const;
  /// Whether ranks tell each other their weights in settle().
  bool exchanges() const { return average_ == Average::kMean && ranks_.size() > 1; }
  /// After the last micro-batch. Collective for means; a GPU's host does not wait. Returns what all ranks
  /// have given as `note`, (k) fp64 on the device, which travels with the weights: (ranks, k); not used, and
  /// undefined, unless it exchanges(). Throws LogicError on a CPU when all weights are 0; on a GPU the
  /// gradient is 0 then.
  at::Tensor settle(const at::Tensor& note);
  /// After a settle() when the last micro-batch has begun: what the caller multiplies every rank's gradients
  /// by before they are added up, which makes them those of the step.
  optim::GradScale take_before_sum();
  /// Forgets the micro-batches of this step.
  void drop() { weight_sum_ = 0.0; }

  /// What reduced gradients are multiplied by when they are applied, and what their norm is multiplied by; on
  /// a device the latter is fp64.
  const optim::GradScale& to_update() const { return to_update_; }
  double to_norm() const;
  /// The gradient is multiplied by `factor`; `applied`: the gradients themselves were multiplied already.
  void scale(double factor, bool applied);
  /// The mean was applied to gradients that were handed out: to_update() is 1 from now on.
  void hand_out() { to_update_ = {}; }

  /// After a recording is launched this must be set to what it was after the recorded pass.
  struct State {
    double weight_sum = 0.0;
    optim::GradScale to_update = {}, to_norm = {};
  };
  State state() const { return {weight_sum_, to_update_, to_norm_}; }
  void set_state(const State& state);

 private:
  comm::Group& ranks_;
  Average average_;
  c10::Device device_;
  double weight_sum_ = 0.0;  ///< of this rank's micro-batches
  optim::GradScale to_update_, to_norm_;
};

/// In place; in the dtype of `gradient`.
void multiply(const at::Tensor& gradient, const optim::GradScale& factor);

}  // namespace trireme::parallel
