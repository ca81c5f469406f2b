#pragma once
// Causal self-attention over packed projections, with grouped key/value heads and rotary positions.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace trireme::nn {

struct AttentionShape {
  int64_t heads = 0;     ///< query heads
  int64_t kv_heads = 0;  ///< key/value heads; divides heads
  int64_t head_dim = 0;
};

/// Cosines and sines of rotary positions: each (seq_len, head_dim / 2) fp32.
struct RopeTable {
  at::Tensor cosine;
  at::Tensor sine;
};
RopeTable make_rope_table(int64_t seq_len, int64_t head_dim, double theta, at::Device device);

/// What computes attention.
enum class AttentionBackend {
  kShortCpu,    ///< our own, which keeps the probabilities
  kBlockedCpu,  ///< ATen's blocks on a CPU
  kCudnn,
  kAten  ///< what ATen picks
};
AttentionBackend attention_backend(at::Device device, at::ScalarType dtype, int64_t length, int64_t head_dim,
                                   double dropout);
/// For people.
std::string_view name(AttentionBackend backend);

/// qkv (B, T, (heads + 2 kv_heads) * head_dim), query | key | value heads -> (B, T, heads * head_dim).
/// `rope` may hold undefined tensors: no rotation. qkv is consumed: its memory may be overwritten.
/// `dropout` is the probability of dropping an attention weight.
at::Tensor causal_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                            double dropout = 0.0);

}  // namespace trireme::nn
