#pragma once
// Attention over sequences whose tokens are split over ranks (context parallelism). Each rank has T / n of
// the tokens, and attention alone looks at those of others. Everything else in a model looks at one token at
// a time. The model knows no ranks; whoever splits its input hands in a context.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "trireme/nn/attention.h"
#include "trireme/nn/documents.h"
#include "trireme/plan/token_split.h"

namespace trireme::nn {

class Context {
 public:
  explicit Context(plan::TokenSplit tokens) : tokens_(std::move(tokens)) {}
  virtual ~Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// The tokens that this rank has.
  const plan::TokenSplit& tokens() const { return tokens_; }
  int64_t size() const { return tokens_.ranks; }

  /// As attention_in_context(). Collective, and so is backward.
  virtual at::Tensor attend(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                            double dropout, KeptAttention* kept, const Documents& documents) const = 0;

 private:
  plan::TokenSplit tokens_;
};

/// Null: sequences are whole.
using ContextPtr = std::shared_ptr<const Context>;

/// For attention ranks exchange tokens, so that each has some heads of all of them, and exchange back what
/// attention makes of these: DeepSpeed-Ulysses (Jacobs et al. 2023). Heads divide by n; of fewer key and
/// value heads than ranks, several ranks get the same.
class UlyssesContext : public Context {
 public:
  using Context::Context;

  /// x (B, T / n, n, k), of which the third dimension says for whom features are -> (B, T, k), this rank's of
  /// all tokens. With its gradient; collective in both directions.
  virtual at::Tensor exchange_tokens(const at::Tensor& x) const = 0;
  /// The inverse: x (B, T, k) -> (B, T / n, n, k).
  virtual at::Tensor exchange_heads(const at::Tensor& x) const = 0;

  at::Tensor attend(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope, double dropout,
                    KeptAttention* kept, const Documents& documents) const override;
};

/// causal_attention() of this rank's tokens, qkv (B, T / n, (heads + 2 kv_heads) * head_dim) -> (B, T / n,
/// heads * head_dim), with `rope` and `documents` for all T. Without a context: attention_in_documents().
at::Tensor attention_in_context(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                                double dropout, KeptAttention* kept, const ContextPtr& context,
                                const Documents& documents = {});

/// Some ranges of x along `dim`, one after another; one range is a view.
at::Tensor rows_of(const at::Tensor& x, const std::vector<plan::Range>& ranges, int64_t dim);
/// x (B, T, ...) -> what a rank has of it, (B, T / n, ...).
at::Tensor tokens_of(const at::Tensor& x, const plan::TokenSplit& split);
/// Tokens of all ranks, one after another, (B, T, ...) -> in the order of sequences.
at::Tensor in_order(const at::Tensor& x, const plan::TokenSplit& split);

}  // namespace trireme::nn
