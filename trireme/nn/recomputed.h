#pragma once
// Pairs of operations whose intermediate result is cheap to compute again: it is not kept for backward. Same
// bits as the two operations one after the other. `before` and `after`: as Joints has them. `before` and
// `after` as in nn::Joints.
#include <ATen/core/Tensor.h>

#include <utility>

#include "trireme/nn/functional.h"

namespace trireme::nn {

/// LayerNorm, or RMSNorm where the bias is undefined.
struct Norm {
  at::Tensor weight;
  at::Tensor bias;
  double eps = 0.0;
};

/// {x + delta, linear(norm(x + delta))}. weights as linear_group() takes them, or one in `layout`; delta and
/// biases may be undefined.
std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, at::TensorList weights,
                                                  const at::Tensor& bias,
                                                  WeightLayout layout = WeightLayout::kOutIn,
                                                  const std::optional<Fp8Recipe>& fp8 = {},
                                                  const JointPtr& before = {});

enum class Activation { kSwiglu, kGelu };
/// linear(activation(x)), plus `residual`, which may be undefined
at::Tensor activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                            const at::Tensor& bias, WeightLayout layout = WeightLayout::kOutIn,
                            const at::Tensor& residual = {}, const std::optional<Fp8Recipe>& fp8 = {},
                            const JointPtr& after = {});

}  // namespace trireme::nn
