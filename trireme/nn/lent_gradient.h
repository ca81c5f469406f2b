#pragma once
// Memory for gradients that do not exist yet. Whoever owns it lends it to a parameter without one, and the
// function that computes the first gradient overwrites it, so that nobody fills it with zeros before and no
// product reads them. Other functions know nothing of it: autograd then makes a gradient of its own.
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// Lends `memory`, of the shape, dtype and device of `param`; an undefined one takes back what was lent.
void lend_gradient(const at::Tensor& param, const at::Tensor& memory);
/// Whether lend_gradient() was called for `param` since its data was set.
bool has_lender(const at::Tensor& param);

/// Makes what was lent the gradient of `param`, for the caller to overwrite on the current stream, and
/// returns it; undefined when there is a gradient already, or nothing was lent.
at::Tensor claim_gradient(const at::Tensor& param);
/// Whether claim_gradient() would return memory.
bool can_claim_gradient(const at::Tensor& param);
/// The gradient that `param` has, for the caller to add to on the current stream; undefined: none.
at::Tensor gradient_to_add_to(const at::Tensor& param);

/// The current stream waits for the streams on which the gradient of `param` was overwritten or added to.
/// Autograd does not: it knows nothing of what its functions wrote past it.
void follow_gradient_writers(const at::Tensor& param);

}  // namespace trireme::nn
