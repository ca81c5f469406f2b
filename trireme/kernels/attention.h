#pragma once
// Causal attention on the CPU in fp32. Only what lies on and below the diagonal is computed, up to whole
// tiles; backward computes the probabilities again (FlashAttention: Dao et al. 2022).
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

/// qkv (B, T, row()) holds query, key and value heads; out (B, T, H * head_dim); log_sums (B, H, T) receives
/// the log of the sum of exp(score) of each query, for backward.
void attention_forward(float* out, float* log_sums, const float* qkv, const AttentionSizes& sizes);

/// d_qkv (B, T, row()) is written whole.
void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* log_sums,
                        const AttentionSizes& sizes);

}  // namespace trireme::kernels
