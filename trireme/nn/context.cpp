#include "trireme/nn/context.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::nn {
namespace {

/// Heads of x (B, t, heads * head_dim) by the rank that computes with them: (B, t, ranks, k).
at::Tensor by_rank(const at::Tensor& x, int64_t heads, int64_t ranks) {
  const int64_t copies = std::max<int64_t>(1, ranks / heads);
  at::Tensor each = x.unflatten(2, {heads, -1});
  if (copies > 1) each = each.repeat_interleave(copies, 2);
  return each.reshape({x.size(0), x.size(1), ranks, -1});
}

}  // namespace

at::Tensor attention_in_context(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                double dropout, KeptAttention* kept, const ContextPtr& context) {
  if (!context) return causal_attention(qkv, shape, rope, dropout, kept);
  const auto [heads, kv_heads, head_dim] = shape;
  const int64_t ranks = context->size();
  TRIREME_CHECK(heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0),
                "[nn.attention_in_context] {} ranks cannot share {} heads and {} key and value heads", ranks,
                heads, kv_heads);
  const auto parts = qkv.split_with_sizes({heads * head_dim, kv_heads * head_dim, kv_heads * head_dim}, 2);
  const at::Tensor sent = at::cat({by_rank(parts[0], heads, ranks), by_rank(parts[1], kv_heads, ranks),
                                   by_rank(parts[2], kv_heads, ranks)},
                                  3);
  const AttentionShape mine{heads / ranks, std::max<int64_t>(1, kv_heads / ranks), head_dim};
  const at::Tensor made = causal_attention(context->exchange_tokens(sent), mine, rope, dropout, kept);
  return context->exchange_heads(made).flatten(2, 3);
}

}  // namespace trireme::nn
