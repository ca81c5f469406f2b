#pragma once
// Causal self-attention over packed projections, with grouped key/value heads and rotary positions.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/plan/choices.h"

namespace trireme::nn {

struct AttentionShape {
  int64_t heads = 0;     ///< query heads
  int64_t kv_heads = 0;  ///< key/value heads; divides heads
  int64_t head_dim = 0;
  plan::AttentionKind kind = plan::AttentionKind::kAuto;  ///< model.attention
};

/// Cosines and sines of rotary positions: each (seq_len, head_dim / 2) fp32, or for places that differ from
/// sequence to sequence (B, T, head_dim / 2).
struct RopeTable {
  at::Tensor cosine;
  at::Tensor sine;
};
/// Frequencies changed for longer sequences, as Llama 3.1 does: wavelengths above original_len / low_freq
/// become `factor` times longer, those below original_len / high_freq stay, and in between the change grows.
/// A factor of 1 changes nothing.
struct RopeStretch {
  double factor = 1.0;
  double low_freq = 1.0, high_freq = 4.0;
  int64_t original_len = 8192;
};
/// The table of positions 0 to seq_len - 1 on `device`; `head_dim` is even, `theta` the base of the
/// frequencies (model.rope_theta).
RopeTable make_rope_table(int64_t seq_len, int64_t head_dim, double theta, at::Device device,
                          const RopeStretch& stretch = {});

/// The libraries and kernels that compute attention.
enum class AttentionBackend {
  kCpu,  ///< our own, in fp32 (kernels/attention.h)
  kCudnn,
  kCudnnOrdered,  ///< cuDNN, whose backward adds in a fixed order
  kCudnnFlash,    ///< cuDNN forward, FlashAttention backward, which torch can ask for a fixed order
  kFlash,         ///< FlashAttention, for documents (nn/documents.h); told to, it adds in a fixed order
  kAten,          ///< what ATen picks; told to, it picks what repeats its bits
  kEager          ///< products and a softmax in fp32, with a tensor of scores
};
/// The backend of AttentionKind::kAuto for these inputs; that of kEager is kEager. Where
/// kernels::must_repeat() holds, one whose bits repeat at every length and head size:
/// - bf16 and fp16 with heads of a multiple of 8 up to 128: kCudnnOrdered on compute capability 9.0 (where
///   cuDNN has no such plan its backward is kCudnnFlash's), kCudnnFlash on others from 8.0 on;
/// - bf16 and fp16 with other heads up to 256 (192 on 8.6, 8.9 and 12.x), or with dropout: kAten, which picks
///   FlashAttention;
/// - all else: kAten, which picks memory-efficient attention, whose backward then walks all keys in a
///   block, or for grouped heads plain products and a softmax.
AttentionBackend attention_backend(at::Device device, at::ScalarType dtype, int64_t length, int64_t head_dim,
                                   double dropout);
/// The backend's name, for people.
std::string_view name(AttentionBackend backend);
/// Whether two backward passes over the same inputs give the same bits.
bool repeats_bits(AttentionBackend backend, int64_t length);

/// Results of attention, kept for the second call with the same qkv that backward makes where it computes a
/// block again. Empty before the first call; the second takes them instead of computing.
struct KeptAttention {
  std::vector<at::Tensor> tensors;  ///< the output, and what the backend needs beside it
};
/// The result of `compute`, or that of an earlier call if `kept` has it.
template <typename Compute>
std::vector<at::Tensor> kept_or_computed(KeptAttention* kept, const Compute& compute) {
  if (kept == nullptr) return compute();
  if (!kept->tensors.empty()) return std::exchange(kept->tensors, {});
  return kept->tensors = compute();
}

/// qkv (B, T, (heads + 2 kv_heads) * head_dim), query | key | value heads -> (B, T, heads * head_dim).
/// `rope` may hold undefined tensors: no rotation. qkv is consumed: its memory may be overwritten.
/// `dropout` is the probability of dropping an attention weight. `kept` may be nullptr; kAten and
/// kEager leave it empty.
at::Tensor causal_attention(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                            double dropout = 0.0, KeptAttention* kept = nullptr);

}  // namespace trireme::nn
