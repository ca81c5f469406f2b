#pragma once
// Backward in two halves, as zero-bubble pipelines want it (Qi et al. 2024): what flows on to the layers
// before at once, gradients of weights when their time has come.
//
//   nn::DeferredGradients later;
//   {
//     const nn::DeferredGradients::Scope scope(later);
//     loss.backward();
//   }
//   ...
//   later.run();
#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace trireme::nn {

/// Gradients of weights and biases that are still to be computed, of one stage and micro-batch. Several may
/// be filled and wait at once; run() may be called by any thread, after the backward pass.
///
/// Deferred are the weights and biases of linear(), linear_group(), add_norm_linear() and activated_linear().
/// All else comes with the first half: gradients of inputs, norms, embeddings and the head (logits(),
/// linear_cross_entropy()), whose weight may be an embedding's, and whatever torch's own modules and
/// functions compute.
///
/// run() uses the kernels that backward would have used, in the same order, so the gradients are the same
/// bits. Only a weight that several operations use and that has neither a gradient nor lent memory may
/// differ in rounding: autograd adds before it stores. Hooks that torch calls with the gradient of such a
/// parameter do not see it. Those of call_when_complete() run in the first half, when nothing is there yet:
/// whoever counts on them counts a deferred parameter as complete after run(). Memory lent for gradients
/// must be there at run().
class DeferredGradients {
 public:
  DeferredGradients();
  ~DeferredGradients();  ///< forgets what was not run
  DeferredGradients(const DeferredGradients&) = delete;
  DeferredGradients& operator=(const DeferredGradients&) = delete;

  /// Backward passes that this thread begins while it lives, and those that begin within them, defer to
  /// `store`; of nested scopes the innermost counts. On a GPU, too, where autograd has threads of its own.
  class Scope {
   public:
    explicit Scope(DeferredGradients& store);

   private:
    c10::DebugInfoGuard guard_;
  };

  /// Computes what was deferred, in the order in which backward came to it, on the current stream of
  /// the weights' device, which must be that of the backward pass. Inputs and gradients that are no longer
  /// needed are freed on the way. Throws LogicError when one of them was written to since; what comes after
  /// it is then still deferred.
  void run();

  /// Linear operations whose gradients are deferred.
  int64_t count() const;
  /// Of all tensors that are kept for them, memory that several share counted once, and that of `but_for` not
  /// at all.
  int64_t bytes(const at::Tensor& but_for = {}) const;

 private:
  friend struct Deferral;
  class Parked;
  std::shared_ptr<Parked> parked_;
};

}  // namespace trireme::nn
