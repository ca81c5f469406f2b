#pragma once
// Attention on the CPU in fp32. With a causal mask only what lies on and below the diagonal is computed, up
// to whole tiles; backward computes the probabilities again (FlashAttention: Dao et al. 2022).
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
/// the log of the sum of exp(score) of each query, for backward. Causal. `starts` (B, T) keeps documents
/// apart: the place in its sequence at which the document of each token begins. Bits are those of each
/// document alone; scores between documents are not computed. nullptr: a sequence is one document.
void attention_forward(float* out, float* log_sums, const float* qkv, const AttentionSizes& sizes,
                       const int32_t* starts = nullptr);

/// d_qkv (B, T, row()) is written whole.
void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* log_sums,
                        const AttentionSizes& sizes, const int32_t* starts = nullptr);

/// Heads of tokens (B, T, heads, head_dim), of which head_dim is contiguous and heads lie side by side.
template <typename Float>
struct HeadRows {
  Float* data = nullptr;
  int64_t batch_stride = 0, stride = 0;  ///< floats from one sequence, and one token, to the next
};

/// Attention of some queries over some keys.
struct AttentionPartSizes {
  int64_t batch = 0;
  int64_t queries = 0, keys = 0;  ///< tokens of a sequence
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  bool is_causal = false;  ///< query i sees keys 0 to i, and there are as many of both; else all see all
};
struct AttentionPartInput {
  HeadRows<const float> query, key, value;
};
struct AttentionPartGradient {
  HeadRows<float> query, key, value;
};

/// out as the queries; log_sums (B, H, queries).
void attention_part_forward(const HeadRows<float>& out, float* log_sums, const AttentionPartInput& input,
                            const AttentionPartSizes& sizes);

/// The share of these keys in the gradient of attention over more of them: `log_sums` are those of all, and
/// `dots` (B, H, queries) the scalar products of rows of the whole output and of its gradient d_out. nullptr:
/// these are all keys, and the products follow from them. Writes all of `gradient`.
void attention_part_backward(const AttentionPartGradient& gradient, const HeadRows<const float>& d_out,
                             const AttentionPartInput& input, const float* log_sums, const float* dots,
                             const AttentionPartSizes& sizes);

}  // namespace trireme::kernels
