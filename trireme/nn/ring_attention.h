#pragma once
// Ring attention (Liu et al. 2023): each rank keeps the queries of its tokens, and keys and values visit one
// rank after another. A rank has a piece from the front and the one as far from the end of each sequence
// (zigzag), so that every visit is a whole block of scores: all queries see the earlier piece of an earlier
// rank, and the later queries see both pieces of a later rank; only a rank's own keys need a causal mask.
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "trireme/nn/context.h"

namespace trireme::nn {

class RingContext : public Context, public std::enable_shared_from_this<RingContext> {
 public:
  /// The host, and on a GPU the current stream, go on when both tensors may be used again.
  using Arrival = std::function<void()>;

  using Context::Context;

  /// Begins to send `mine` to the next rank and to receive into `theirs`, of the same shape and dtype, what
  /// the rank before this one sends; both are contiguous, and stay as they are until the arrival. Passes
  /// arrive in the order in which they begin. Collective.
  virtual Arrival pass_on(const at::Tensor& mine, at::Tensor& theirs) const = 0;

  /// Attention of any numbers of heads, without dropout, of which documents are not kept apart. Outputs of
  /// parts are merged in fp32 by the logarithms of their sums. In backward gradients of keys and values
  /// travel behind these, in fp32: what a rank has of them is the sum over ranks in the order of the ring,
  /// its own part last, so that bits repeat.
  at::Tensor attend(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope, double dropout,
                    KeptAttention* kept, const Documents& documents) const override;
};

}  // namespace trireme::nn
