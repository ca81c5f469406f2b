#pragma once
// The seams of a model whose linear layers are cut over ranks: tensor parallelism (Shoeybi et al. 2019,
// Megatron-LM), with tokens split between the cut layers (Korthikanti et al. 2022, Reducing Activation
// Recomputation in Large Transformer Models). The model knows no ranks; whoever cuts it hands in a joint.
//
// Between cut layers a rank has rows of its own: activations (B, T / n, D) on each of n ranks, whose rows one
// rank after another are the rows of (B, T, D). So a shape tells B and T. Inside of cut layers it has all
// rows and some features. A rank enters by a gather, whose gradient is a sum over ranks, and leaves by a sum
// of which each rank keeps its rows, whose gradient is a gather.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace trireme::nn {

/// The result of a collective that runs beside computation.
class Arriving {
 public:
  Arriving() = default;
  /// `wait` makes the current stream wait for `result`; null: it is there.
  explicit Arriving(at::Tensor result, std::function<void()> wait = nullptr)
      : result_(std::move(result)), wait_(std::move(wait)) {}

  /// Whether there is something to take.
  bool pending() const { return result_.defined(); }
  /// The result, for which the current stream waits. Once.
  at::Tensor take() {
    if (wait_) std::exchange(wait_, nullptr)();
    return std::exchange(result_, {});
  }

 private:
  at::Tensor result_;
  std::function<void()> wait_;
};

class Joint {
 public:
  /// `vocabulary`: the first row of each rank's part of a vocabulary, and behind them its size.
  Joint(int64_t rank, std::vector<int64_t> vocabulary) : rank_(rank), vocabulary_(std::move(vocabulary)) {}
  virtual ~Joint() = default;
  Joint(const Joint&) = delete;
  Joint& operator=(const Joint&) = delete;

  int64_t size() const { return static_cast<int64_t>(vocabulary_.size()) - 1; }
  int64_t rank() const { return rank_; }
  const std::vector<int64_t>& vocabulary() const { return vocabulary_; }
  int64_t first_word() const { return vocabulary_[static_cast<size_t>(rank_)]; }

  /// rows (n, ...) of each rank, contiguous -> (size * n, ...) of all, in the order of ranks. Collective, in
  /// the order of the calls that begin; `rows` must not be written to before the result is taken.
  virtual Arriving begin_gather(const at::Tensor& rows) const = 0;
  /// The sum of the ranks' (size * n, ...), contiguous, in an order that depends on the ranks alone, of which
  /// this rank gets its rows: (n, ...) fp32, in `sum` where that is defined. Collective as begin_gather() is.
  virtual Arriving begin_reduce_scatter(const at::Tensor& partial, const at::Tensor& sum = {}) const = 0;

  /// Uninitialised memory for a tensor that begin_reduce_scatter() is given next, where other ranks can read
  /// it. Collective.
  virtual at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) const = 0;

  at::Tensor gather(const at::Tensor& rows) const { return begin_gather(rows).take(); }
  at::Tensor reduce_scatter(const at::Tensor& partial) const { return begin_reduce_scatter(partial).take(); }

  /// Whether products of rows are computed in pieces, while other pieces are gathered or summed up. Products
  /// of fewer rows may round otherwise.
  virtual bool overlaps_products() const = 0;

 private:
  int64_t rank_;
  std::vector<int64_t> vocabulary_;
};

/// Null: nothing is cut, and there is one rank.
using JointPtr = std::shared_ptr<const Joint>;

/// The joints of a linear layer. With `before`, it takes a rank's rows and makes features of all rows; with
/// `after` it takes features of all rows, and makes sums for a rank's rows.
struct Joints {
  JointPtr before, after;
};

/// x (B, T, D) of which each rank has some terms -> the sums for this rank's rows, (B, T / n, D). Without a
/// joint: x.
at::Tensor leave(const at::Tensor& x, const JointPtr& joint);
/// Rows of weight (rows, width), of which this rank has its part of the vocabulary, that indices (B, T) int64
/// name -> this rank's (B, T / n, width). Without a joint: embedding().
at::Tensor embedding(const at::Tensor& indices, const at::Tensor& weight, const JointPtr& joint);
/// The numbers of this rank's tokens within their sequences, (B, T / n) int64, for tokens (B, T).
at::Tensor positions(const at::Tensor& tokens, const Joint& joint);
/// x (B, T / n, D), weight (V', D), this rank's part of the vocabulary -> logits (B, T, V) on every rank. For
/// evaluation: throws LogicError where gradients are wanted.
at::Tensor joined_logits(const at::Tensor& x, const at::Tensor& weight, const Joint& joint);

}  // namespace trireme::nn
