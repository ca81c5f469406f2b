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

at::Tensor UlyssesContext::attend(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                  double dropout, KeptAttention* kept, const Documents& documents) const {
  const auto [heads, kv_heads, head_dim, kind] = shape;
  const int64_t ranks = size();
  TRIREME_CHECK(plan::can_share_heads(heads, kv_heads, ranks),
                "[nn.attention_in_context] {} ranks cannot share {} heads and {} key and value heads", ranks,
                heads, kv_heads);
  const auto parts = qkv.split_with_sizes({heads * head_dim, kv_heads * head_dim, kv_heads * head_dim}, 2);
  const at::Tensor sent = at::cat({by_rank(parts[0], heads, ranks), by_rank(parts[1], kv_heads, ranks),
                                   by_rank(parts[2], kv_heads, ranks)},
                                  3);
  const AttentionShape mine{heads / ranks, std::max<int64_t>(1, kv_heads / ranks), head_dim, kind};
  const at::Tensor made = attention_in_documents(exchange_tokens(sent), mine, rope, dropout, kept, documents);
  return exchange_heads(made).flatten(2, 3);
}

at::Tensor attention_in_context(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                double dropout, KeptAttention* kept, const ContextPtr& context,
                                const Documents& documents) {
  return context ? context->attend(qkv, shape, rope, dropout, kept, documents)
                 : attention_in_documents(qkv, shape, rope, dropout, kept, documents);
}

at::Tensor rows_of(const at::Tensor& x, const std::vector<plan::Range>& ranges, int64_t dim) {
  std::vector<at::Tensor> rows;
  for (const plan::Range& range : ranges) rows.push_back(x.narrow(dim, range.begin, range.size()));
  return rows.size() == 1 ? rows.front() : at::cat(rows, dim);
}

at::Tensor tokens_of(const at::Tensor& x, const plan::TokenSplit& split) {
  return rows_of(x, split.ranges(x.size(1)), 1);
}

at::Tensor in_order(const at::Tensor& x, const plan::TokenSplit& split) {
  if (!split.zigzag) return x;
  at::Tensor ordered = at::empty_like(x);
  int64_t first = 0;
  for (const plan::Range& range : split.of_all_ranks(x.size(1))) {
    ordered.narrow(1, range.begin, range.size()).copy_(x.narrow(1, first, range.size()));
    first += range.size();
  }
  return ordered;
}

}  // namespace trireme::nn
