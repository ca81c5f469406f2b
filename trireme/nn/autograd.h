#pragma once
// Shared by the autograd functions of this room: where a parameter's gradient goes.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include "trireme/base/error.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {

/// Whether a kernel that computes a gradient adds to fp32 whatever the dtype of its input.
enum class AddsTo { kSameDtype, kFp32Too };

/// The tensor that a kernel adds a parameter's gradient to: the gradient that exists, else memory, lent or
/// new.
class GradTarget {
 public:
  /// The content of new memory: zeros to add to, or anything, for a kernel that overwrites it unless adds().
  enum Fresh { kZeroed, kAsItIs };

  explicit GradTarget(const at::Tensor& param, AddsTo adds_to = AddsTo::kSameDtype, Fresh fresh = kZeroed) {
    if (adds_to == AddsTo::kFp32Too || gradient_dtype(param) == param.scalar_type()) {
      tensor_ = gradient_to_add_to(param);
      if (tensor_.defined()) return;
      tensor_ = claim_gradient(param);
    }
    in_place_ = tensor_.defined();
    if (!in_place_) tensor_ = at::empty_like(param);
    adds_ = fresh == kZeroed;
    if (adds_) tensor_.zero_();
  }
  GradTarget(const at::Tensor& param, Fresh fresh) : GradTarget(param, AddsTo::kSameDtype, fresh) {}
  at::Tensor& tensor() { return tensor_; }
  bool adds() const { return adds_; }
  /// The gradient that backward returns to autograd: undefined where it is in place already.
  at::Tensor reported() const { return in_place_ ? at::Tensor() : tensor_; }

 private:
  bool in_place_ = true, adds_ = true;
  at::Tensor tensor_;
};

/// Throws LogicError in a backward pass that is to be differentiated itself: our kernels record no graph, and
/// autograd would take what they compute for constants. `function` as "nn.gelu".
inline void refuse_create_graph(std::string_view function) {
  if (!at::GradMode::is_enabled()) return;
  throw LogicError(
      "[{}] backward was called with create_graph=true, but this function has no second derivative; call "
      "backward without create_graph, or use torch's own modules and functions",
      function);
}

/// An undefined tensor as an absent argument: autograd functions take no undefined ones.
inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace trireme::nn
