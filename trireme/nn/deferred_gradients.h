#pragma once
// Backward in two halves, as zero-bubble pipelines want it (Qi et al. 2024): the backward pass computes the
// gradients that flow on to earlier layers, and run() computes the gradients of weights later.
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

/// Gradients of weights and biases that are still to be computed, of one stage and micro-batch. Several
/// DeferredGradients may be filled and wait at once; run() may be called by any thread, after the backward
/// pass.
///
/// Deferred are the weights and biases of linear(), linear_group(), add_norm_linear() and activated_linear().
/// All else comes with the first half: gradients of inputs, norms, embeddings and the head (logits(),
/// linear_cross_entropy()), whose weight may be an embedding's, and whatever torch's own modules and
/// functions compute.
///
/// run() uses the kernels that backward would have used, in the same order, so the gradients are the same
/// bits. Only a weight that several operations use and that has neither a gradient nor lent memory may
/// differ in rounding: autograd adds before it stores. Where hooks are to see the gradient of a parameter, or
/// the pass is for certain tensors only, nothing of the operation is deferred. Callbacks of
/// call_when_complete() run in the first half, when nothing is there yet:
/// whoever counts on them counts a deferred parameter as complete after run(). Memory lent for gradients
/// must be there at run().
class DeferredGradients {
 public:
  DeferredGradients();
  ~DeferredGradients();  ///< forgets what was not run
  DeferredGradients(const DeferredGradients&) = delete;
  DeferredGradients& operator=(const DeferredGradients&) = delete;

  /// While a Scope lives, backward passes that this thread begins, and those that begin within them, defer to
  /// `store`, also on a GPU, where autograd has threads of its own. If scopes nest, the innermost counts.
  class Scope {
   public:
    explicit Scope(DeferredGradients& store);

   private:
    c10::DebugInfoGuard guard_;
  };

  /// Computes what was deferred, in the order in which backward came to it, on the current stream of the
  /// weights' device, which must be that of the backward pass. Inputs and gradients that are no longer needed
  /// are freed on the way. Throws LogicError when one of these tensors was written to since; the operations
  /// after it are then still deferred.
  void run();

  /// Linear operations whose gradients are deferred.
  int64_t count() const;
  /// Bytes of the tensors kept for them; memory that several tensors share counts once, and the memory of
  /// `but_for` not at all.
  int64_t bytes(const at::Tensor& but_for = {}) const;

 private:
  friend struct Deferral;
  class Parked;
  std::shared_ptr<Parked> parked_;
};

}  // namespace trireme::nn
