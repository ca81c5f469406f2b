#pragma once
// Two points of the backward pass that modules have no hooks for: before the first and after the last
// gradient computation of a block.
#include <ATen/core/Tensor.h>

#include <functional>

namespace trireme::parallel {

/// Returns x with an identity node behind it: in backward, `callback` runs once the gradient of x is
/// complete, that is after everything that was computed from the returned tensor. Without a gradient on x the
/// callback never runs.
at::Tensor call_after_backward(const at::Tensor& x, std::function<void()> callback);

/// In backward, `callback` runs when the gradient of y has arrived and before it flows further.
void call_before_backward(const at::Tensor& y, std::function<void()> callback);

}  // namespace trireme::parallel
