#pragma once
// Activations that are computed again in backward instead of being kept (Chen et al. 2016).
#include <ATen/core/Tensor.h>

#include <functional>

namespace trireme::memory {

/// Returns forward(x) and keeps only x for backward. Backward calls `forward` again, with the state of the
/// random generator and of autocast that the first call found, and differentiates the second call: the
/// gradients are the same bits if `forward` computes the same bits twice. What `forward` refers to must live
/// until backward is done. x may have any dtype. Inside, autocast casts a weight anew for each use.
/// Only plain backward passes work, since the gradients of all parameters inside are added to their grad():
/// create_graph, torch::autograd::grad and backward with inputs throw LogicError.
/// `draws` false promises that `forward` draws no random numbers: the generator's state is not kept, and the
/// pass can be recorded as a CUDA graph. `again`, unless empty, is what backward calls instead of `forward`:
/// the same function of x and of parameters without the effects that must not come twice; only its gradients
/// are used, so the values that it returns may be any.
at::Tensor recomputed(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& forward,
                      bool draws = true, const std::function<at::Tensor(const at::Tensor&)>& again = {});

}  // namespace trireme::memory
