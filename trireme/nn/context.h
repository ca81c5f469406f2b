#pragma once
// Attention over sequences whose tokens are split over ranks (context parallelism). Each rank has T / n
// neighbouring tokens; for attention ranks exchange them, so that each has some heads of all tokens, and
// exchange back what attention makes of them: DeepSpeed-Ulysses (Jacobs et al. 2023). Everything else in a
// model looks at one token at a time. The model knows no ranks; whoever splits its input hands in a context.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "trireme/nn/attention.h"

namespace trireme::nn {

class Context {
 public:
  Context(int64_t rank, int64_t size) : rank_(rank), size_(size) {}
  virtual ~Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }

  /// x (B, T / n, n, k), of which the third dimension says for whom features are -> (B, T, k), this rank's of
  /// all tokens. With its gradient; collective in both directions.
  virtual at::Tensor exchange_tokens(const at::Tensor& x) const = 0;
  /// The inverse: x (B, T, k) -> (B, T / n, n, k).
  virtual at::Tensor exchange_heads(const at::Tensor& x) const = 0;

 private:
  int64_t rank_, size_;
};

/// Null: sequences are whole.
using ContextPtr = std::shared_ptr<const Context>;

/// causal_attention() of this rank's tokens, qkv (B, T / n, (heads + 2 kv_heads) * head_dim) -> (B, T / n,
/// heads * head_dim), with `rope` for all T. `heads` divide by n; of fewer key and value heads than ranks,
/// several ranks get the same. Without a context: causal_attention().
at::Tensor attention_in_context(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                double dropout, KeptAttention* kept, const ContextPtr& context);

}  // namespace trireme::nn
