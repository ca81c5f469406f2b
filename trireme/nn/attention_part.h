#pragma once
// Attention of some queries over some of the keys that they see, and its gradient: what ring attention is
// made of.
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// Heads may be strided, their elements are contiguous.
struct AttentionPart {
  at::Tensor query;        ///< (B, Tq, H, head_dim)
  at::Tensor key, value;   ///< (B, Tk, K, head_dim), K divides H
  bool is_causal = false;  ///< query i sees keys 0 to i, and Tq = Tk; else every query sees all keys
};

struct PartOutput {
  at::Tensor output;    ///< (B, Tq, H, head_dim), softmax over these keys alone
  at::Tensor log_sums;  ///< (B, H, Tq) fp32, of exp(score) over these keys
};
PartOutput attend(const AttentionPart& part);

/// fp32 on a CPU, else in any dtype.
struct PartGradients {
  at::Tensor query, key, value;  ///< of the shapes of what they are gradients of
};
/// The share of these keys in the gradient of attention over all keys. `d_output` and `output` are the
/// gradient and the value of the whole attention's output, (B, Tq, H, head_dim), `log_sums` (B, H, Tq) fp32
/// the logarithms over all keys (FlashAttention-2: Dao 2023). Where kernels::must_repeat() holds, bits
/// repeat.
PartGradients attend_backward(const AttentionPart& part, const at::Tensor& d_output, const at::Tensor& output,
                              const at::Tensor& log_sums);

}  // namespace trireme::nn
