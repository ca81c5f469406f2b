#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "trireme/nn/fp8.h"

namespace trireme::nn {

/// Mean cross-entropy in nats: logits (..., V), targets (...) int64 -> scalar fp32. The logits are consumed:
/// their memory becomes the gradient, and a second backward pass through one loss throws LogicError. As in
/// torch, rows whose target is -100 are left out of the mean, and a mean over no rows is NaN with gradients
/// of zero. Another target that is no class: throws DataError on a CPU, gives NaN on a GPU. Where
/// micro-batches or ranks leave out different numbers of rows, the mean of their losses is not the mean over
/// all rows: weight each by the rows that it kept.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

/// cross_entropy(x @ weight^T, targets) of x (..., D) and weight (V, D), with logits that exist only in parts
/// of at most `chunk_bytes`: gradients are computed in the forward pass, while a part is there, and scaled in
/// backward. They are kept multiplied by `gradient_scale`, which should be near what backward brings: fp16
/// loses small ones otherwise. As in Liger Kernel (Hsu et al. 2024). The gradient of the weight is a sum over
/// the parts: the product of each is summed in fp32 and rounded to the weight's dtype as it is added.
/// With `fp8`, of bf16 alone, the three products take FP8: x and the weight in e4m3, gradients of logits in
/// e5m2 whatever the recipe says, since most of them are far below the largest, which is known beforehand and
/// decides the scale. The sum over the vocabulary keeps all its bits.
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                int64_t chunk_bytes, double gradient_scale = 1.0,
                                const std::optional<Fp8Recipe>& fp8 = {});

}  // namespace trireme::nn
