#pragma once
// Delayed scaling: activations, gradients and weights are scaled by the largest magnitudes of the steps
// before (Micikevicius et al. 2022, FP8 Formats for Deep Learning, section 3.2), so that casts need not have
// seen a tensor whole.
#include <ATen/core/Tensor.h>

#include <functional>

#include "trireme/nn/fp8.h"

namespace trireme::nn {

/// Of the linear layers of all blocks of a model, on one device. On a GPU everything is enqueued on the
/// current stream.
class Fp8History {
 public:
  /// Of so many steps. Throws LogicError for numbers below 1.
  Fp8History(int64_t blocks, int64_t steps, at::Device device);

  /// `recipe` for the layers of a block: their casts raise what the step has seen, and are scaled by the
  /// history once there is one.
  Fp8Recipe of_block(Fp8Recipe recipe, int64_t block) const;

  /// What casts of this step have seen, int32 whose order is that of the magnitudes: ranks that hold parts of
  /// a step, or other blocks, take the largest before end_step().
  at::Tensor seen() const;
  /// What was seen becomes part of the history, and the next step is scaled by it. Magnitudes that are not
  /// finite, and zeros, leave a layer the one of the step before.
  void end_step();

  /// (steps, layers) fp32 on the CPU, the newest first; (0, layers) before the first step.
  at::Tensor saved() const;
  /// Goes on from what saved() gave, also another number of steps. False: it is of another model, or has no
  /// magnitude of a layer of `blocks`, and nothing has changed.
  bool restore(const at::Tensor& saved, const std::function<bool(int64_t block)>& blocks);

 private:
  int64_t known_ = 0;   ///< steps
  int64_t newest_ = 0;  ///< row
  at::Tensor rows_;     ///< (steps, layers) magnitudes by step, as in a ring
  at::Tensor amax_;     ///< (layers) the largest of them
  at::Tensor seen_;     ///< (layers)
};

}  // namespace trireme::nn
