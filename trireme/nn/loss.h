#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme::nn {

/// Mean cross-entropy in nats over all rows: logits (..., V), targets (...) int64 -> scalar fp32. The logits
/// are consumed: their memory becomes the gradient.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

/// cross_entropy(x @ weight^T, targets) of x (..., D) and weight (V, D), with logits that exist only in parts
/// of at most `chunk_bytes`: gradients are computed in the forward pass, while a part is there, and scaled in
/// backward. They are kept multiplied by `gradient_scale`, which should be near what backward brings: fp16
/// loses small ones otherwise. As in Liger Kernel (Hsu et al. 2024).
at::Tensor linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets,
                                int64_t chunk_bytes, double gradient_scale = 1.0);

}  // namespace trireme::nn
