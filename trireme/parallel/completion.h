#pragma once
// Which parameters of an engine have their gradients: how many of each unit are still to come in a backward
// pass, which took part in a step, and what was frozen.
#include <functional>
#include <memory>
#include <vector>

#include "trireme/parallel/flat_unit.h"

namespace torch::autograd {
struct Node;
}

namespace trireme::parallel {

class Completion {
 public:
  using Units = std::vector<std::unique_ptr<FlatUnit>>;
  /// By unit and parameter.
  using Flags = std::vector<std::vector<bool>>;
  /// Called in a backward pass when the gradient of a parameter is complete.
  using Callback = std::function<void(size_t unit, size_t param)>;

  /// `units` must outlive this.
  Completion(const Units& units, Callback callback);
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;

  /// Whether parameters were frozen or thawed since the last call.
  bool follow_freezing();
  const Flags& trainable() const { return trainable_; }

  /// Before a backward pass.
  void begin();
  /// Notes that the parameter has its gradient; returns whether all parameters of its unit have theirs.
  /// Throws LogicError that names the parameter when it had a gradient before in this pass.
  bool take(size_t unit, size_t param);
  /// Throws LogicError that names parameters which took no part in this step.
  void check_all_used(int64_t rank) const;
  /// At the end of a step.
  void forget();

  /// Parameters that took part in the step so far.
  const Flags& used() const { return used_; }
  void set_used(Flags used) { used_ = std::move(used); }

  /// Watches the parameter's gradient anew, after set_data() may have given the parameter another gradient
  /// accumulator.
  void follow(size_t unit, size_t param);

 private:
  using Node = std::shared_ptr<torch::autograd::Node>;
  Flags trainable_now() const;
  void watch(size_t unit, size_t param);

  const Units& units_;
  Callback callback_;
  std::vector<std::vector<Node>>
      accumulators_;           ///< by unit and parameter; null: it required no gradient so far
  std::vector<Node> passing_;  ///< of graphs from before a follow()
  Flags trainable_;            ///< as the last step saw it
  Flags used_;                 ///< in this step
  Flags awaited_;              ///< gradients that are still to come in this backward pass
};

}  // namespace trireme::parallel
