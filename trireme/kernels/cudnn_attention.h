#pragma once
// Backward of causal attention by cuDNN in a fixed order of additions. torch's own call of cuDNN cannot ask
// for one.
#include <ATen/core/Tensor.h>

namespace trireme::kernels {

/// All of bf16 or fp16 but for logsumexp; heads may be strided, their last dimension is contiguous.
struct AttentionPass {
  at::Tensor query;       ///< (B, H, T, hd)
  at::Tensor key, value;  ///< (B, K, T, hd), K divides H
  at::Tensor output;      ///< (B, H, T, hd)
  at::Tensor logsumexp;   ///< (B, H, T) fp32, contiguous: of the scores times 1 / sqrt(hd)
};

struct AttentionGradients {
  at::Tensor query, key, value;  ///< as the inputs
};

/// Writes the gradients for d_output (B, H, T, hd), enqueued on the current stream. The gradient of the
/// scores lies in memory meanwhile, a part of the sequences and heads at a time, and the gradient of the
/// queries is a product of its own, so nothing is added up between blocks. False, with nothing written, where
/// cuDNN knows no such plan.
bool ordered_attention_backward(AttentionGradients& gradients, const at::Tensor& d_output,
                                const AttentionPass& pass);

}  // namespace trireme::kernels
