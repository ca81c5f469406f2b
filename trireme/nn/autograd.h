#pragma once
// Shared by the autograd functions of this room: where a parameter's gradient goes.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/base/error.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {

/// Whether a kernel that computes a gradient adds to fp32 whatever the dtype of its input.
enum class AddsTo { kSameDtype, kFp32Too };

/// The tensor that a kernel adds a parameter's gradient to: the gradient that exists, else zeroed memory,
/// lent or new.
class GradTarget {
 public:
  explicit GradTarget(const at::Tensor& param, AddsTo adds_to = AddsTo::kSameDtype) {
    if (adds_to == AddsTo::kFp32Too || gradient_dtype(param) == param.scalar_type()) {
      tensor_ = gradient_to_add_to(param);
      if (tensor_.defined()) return;
      tensor_ = claim_gradient(param);
    }
    in_place_ = tensor_.defined();
    if (!in_place_) tensor_ = at::empty_like(param);
    tensor_.zero_();
  }
  at::Tensor& tensor() { return tensor_; }
  /// What backward returns to autograd: undefined where the gradient is in place already.
  at::Tensor reported() const { return in_place_ ? at::Tensor() : tensor_; }

 private:
  bool in_place_ = true;
  at::Tensor tensor_;
};

/// An undefined tensor as an absent argument: autograd functions take no undefined ones.
inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace trireme::nn
