#pragma once
// Memory for gradients that do not exist yet. Whoever owns it lends it to a parameter without one, and the
// function that computes the first gradient overwrites it, so that nobody fills it with zeros before and no
// product reads them. Other functions know nothing of it: autograd then makes a gradient of its own.
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// Lends `memory`, of the shape, dtype and device of `param`; an undefined one takes back what was lent.
void lend_gradient(const at::Tensor& param, const at::Tensor& memory);
/// Whether somebody has lent to `param`, or taken back, since its data was set.
bool has_lender(const at::Tensor& param);

/// Makes what was lent the gradient of `param`, for the caller to overwrite, and returns it; undefined when
/// there is a gradient already, or nothing was lent.
at::Tensor claim_gradient(const at::Tensor& param);
/// Whether it would be defined.
bool can_claim_gradient(const at::Tensor& param);

}  // namespace trireme::nn
