#pragma once
// Pairs of operations whose intermediate result is cheap to compute again: it is not kept for backward. Same
// bits as the two operations one after the other. `before` and `after` as in nn::Joints. Where the
// intermediate result is passed on, whoever reads it must not keep it.
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

/// {x + delta, the layers' product with the norm of it, that norm}, as tapped_linear().
struct TappedNorm {
  at::Tensor sum, made, passed;
};
/// `read_by`: how the layers multiply that read what is passed on.
TappedNorm tapped_norm_linear(const at::Tensor& x, const at::Tensor& delta, const Norm& norm,
                              at::TensorList weights, const std::optional<Fp8Recipe>& read_by = {});

enum class Activation { kSwiglu, kGelu };
/// linear(activation(x)), plus `residual`, which may be undefined
at::Tensor activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                            const at::Tensor& bias, WeightLayout layout = WeightLayout::kOutIn,
                            const at::Tensor& residual = {}, const std::optional<Fp8Recipe>& fp8 = {},
                            const JointPtr& after = {});

/// tapped_linear() of activation(x); `read_by` as in tapped_norm_linear().
Tapped tapped_activated_linear(const at::Tensor& x, Activation activation, const at::Tensor& weight,
                               const std::optional<Fp8Recipe>& read_by = {}, const JointPtr& after = {});

}  // namespace trireme::nn
