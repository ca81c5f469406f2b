#pragma once
// Three points of the backward pass that modules have no hooks for: before the first and after the last
// gradient computation of a block, and when the gradient of a parameter is complete.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace torch::autograd {
struct Node;
}

namespace trireme::parallel {

/// Returns x with an identity node behind it: in backward, `callback` runs once the gradient of x is
/// complete, that is after everything that was computed from the returned tensor. Without a gradient on x the
/// callback never runs.
at::Tensor call_after_backward(const at::Tensor& x, std::function<void()> callback);

/// In backward, `callback` runs when the gradient of y has arrived and before it flows further.
void call_before_backward(const at::Tensor& y, std::function<void()> callback);

/// In every backward pass that reaches `leaf`, `callback` runs once, when its gradient is complete: whatever
/// was computed from the leaf has been differentiated. It may have gone to leaf.grad(), or past it by an
/// in-place kernel. Lasts as long as what is returned, and no longer than the leaf's dtype and device.
std::shared_ptr<torch::autograd::Node> call_when_complete(const at::Tensor& leaf,
                                                          std::function<void()> callback);

}  // namespace trireme::parallel
