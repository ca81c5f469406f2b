#pragma once
// Delayed scaling: activations, gradients and weights are scaled by the largest magnitudes of the steps
// before (Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 3.2), so that casts need not have
// seen a tensor whole.
#include <ATen/core/Tensor.h>

#include <functional>

#include "trireme/nn/fp8.h"

namespace trireme::nn {

/// The largest magnitudes in the linear layers of all blocks of a model, on one device. On a GPU everything
/// is enqueued on the current stream.
class Fp8History {
 public:
  /// A history of the last `steps` steps of `blocks` blocks. Throws LogicError for numbers below 1.
  Fp8History(int64_t blocks, int64_t steps, at::Device device);

  /// `recipe` with delayed scaling for the layers of `block`: their casts raise seen(), and are scaled by the
  /// history once there is one.
  Fp8Recipe of_block(Fp8Recipe recipe, int64_t block) const;

  /// The largest magnitudes that casts of this step have seen: (layers) int32, the bits of fp32, which have
  /// the same order. Ranks that compute parts of a step, or other blocks, take the maximum over all of them
  /// before end_step().
  at::Tensor seen() const;
  /// Adds seen() to the history, which scales the next step. A magnitude that is zero or not finite is
  /// replaced by that of the step before.
  void end_step();

  /// (steps, layers) fp32 on the CPU, the newest first; (0, layers) before the first step.
  at::Tensor saved() const;
  /// Goes on from what saved() gave, which may have another number of steps. Returns false, and changes
  /// nothing, when that is of another model or lacks a magnitude of a layer of `blocks`.
  bool restore(const at::Tensor& saved, const std::function<bool(int64_t block)>& blocks);

 private:
  int64_t known_ = 0;   ///< steps
  int64_t newest_ = 0;  ///< row
  at::Tensor rows_;     ///< (steps, layers) magnitudes by step, as in a ring
  at::Tensor amax_;     ///< (layers) the largest of them
  at::Tensor seen_;     ///< (layers)
};

}  // namespace trireme::nn
