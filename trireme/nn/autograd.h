#pragma once
// Shared by the autograd functions of this room: where a parameter's gradient goes, and dispatch by dtype.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "trireme/base/error.h"

namespace trireme::nn {

/// The tensor that a kernel adds a parameter's gradient to, and what backward reports for it.
class GradTarget {
 public:
  explicit GradTarget(const at::Tensor& param)
      : in_place_(param.grad().defined()), tensor_(in_place_ ? param.grad() : at::zeros_like(param)) {}
  at::Tensor& tensor() { return tensor_; }
  at::Tensor reported() const { return in_place_ ? at::Tensor() : tensor_; }

 private:
  bool in_place_;
  at::Tensor tensor_;
};

/// An undefined tensor as an absent argument: autograd functions take no undefined ones.
inline std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// Calls body(Scalar{}) with float or c10::BFloat16 for the dtype of `tensor`.
template <typename Body>
void dispatch_float_or_bf16(const at::Tensor& tensor, const char* operation, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) return body(float{});
  if (tensor.scalar_type() == at::kBFloat16) return body(c10::BFloat16{});
  throw LogicError("[nn.{}] dtype {} has no CPU kernel; use float32 or bfloat16", operation,
                   c10::toString(tensor.scalar_type()));
}

}  // namespace trireme::nn
