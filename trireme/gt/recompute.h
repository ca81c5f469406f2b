#pragma once
// Activations that are computed again in backward instead of being kept.
#include <functional>

#include "trireme/gt/tensor.h"

namespace gt {

/// The result of `body`, with the same values and gradients as without this. Workers keep nothing of it for
/// the backward pass but what goes in and what comes out; gradients that come back have its operations done
/// again, with the seeds that they had. `body` is called once. Scopes, casts and no_grad within it count as
/// usual, and one within another belongs to it. Inside of gt::no_grad, or where nothing in it requires
/// gradients, it is the call of `body` alone.
///
/// Throws trireme::ConfigError for a `body` that writes a tensor, differentiates, or takes a tensor to other
/// workers (one call for each stage), and in backward() where what went in meets what came out: a sum of both
/// belongs into `body`.
Tensor recompute(const std::function<Tensor()>& body, source_location where = source_location::current());

}  // namespace gt
