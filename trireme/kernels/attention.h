#pragma once
// Causal attention for short sequences on the CPU: the probabilities of one head fit the second-level cache,
// so they are computed by plain matrix products and kept for backward. fp32.
#include <cstdint>

namespace trireme::kernels {

struct AttentionSizes {
  int64_t batch = 0;
  int64_t length = 0;    ///< T
  int64_t heads = 0;     ///< H, query heads
  int64_t kv_heads = 0;  ///< K, divides H
  int64_t head_dim = 0;
  int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }  ///< floats of qkv per token
};

/// qkv (B, T, row()) holds query, key and value heads; out (B, T, H * head_dim); probs (B, H, T, T) receives
/// the probabilities on and below the diagonal, and is undefined above it.
void attention_forward(float* out, float* probs, const float* qkv, const AttentionSizes& sizes);

/// d_qkv (B, T, row()) is written whole.
void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* probs,
                        const AttentionSizes& sizes);

}  // namespace trireme::kernels
