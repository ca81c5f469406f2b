#pragma once
// Backward of causal attention by cuDNN as torch's own call of it cannot ask for: into memory of any strides,
// and in a fixed order of additions.
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

/// How the queries' gradient is added up over tiles of keys. kAny: in fp32, in the order in which blocks
/// arrive. kFixed: the gradient of the scores lies in memory, for a part of the sequences and heads at a
/// time, and the queries' gradient is a product of its own.
enum class SumOrder { kAny, kFixed };

/// Writes the gradients for d_output (B, H, T, hd), enqueued on the current stream. False, with nothing
/// written, where cuDNN knows no such plan.
bool attention_backward(AttentionGradients& gradients, const at::Tensor& d_output, const AttentionPass& pass,
                        SumOrder order);

}  // namespace trireme::kernels
