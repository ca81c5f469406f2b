#pragma once
// Activations that are computed again in backward instead of being kept (Chen et al. 2016).
#include <ATen/core/Tensor.h>

#include <functional>

namespace trireme::memory {

/// forward(x), of which only x is kept. Backward calls `forward` again, with the random numbers of the first
/// time, and differentiates that: same gradients, bit for bit, as far as `forward` gives the same bits twice.
/// `forward` must outlive backward's use of what it refers to. `draws` false: it draws no random numbers, so
/// that none need to be remembered; only then can the pass be recorded as a CUDA graph.
at::Tensor recomputed(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& forward,
                      bool draws = true);

}  // namespace trireme::memory
