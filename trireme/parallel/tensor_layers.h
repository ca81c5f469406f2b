#pragma once
// Layers whose parameters are cut over the ranks of a group, for modules of one's own: tensor parallelism
// (Shoeybi et al. 2019, Megatron-LM), and rows split between cut layers (Korthikanti et al. 2022). They take
// a group as SyncBatchNorm does, stand where torch's layers would, and have their names of parameters:
//
//   up = register_module("up", std::make_shared<parallel::ColumnLinear>(d, 4 * d, mesh.tp));
//   down = register_module("down", std::make_shared<parallel::RowLinear>(4 * d, d, mesh.tp));
//   y = x + down->forward(at::gelu(up->forward(norm->forward(x))));
//
// Ranks of a group read the same batch. Between a ColumnLinear and a RowLinear a rank has some features (or
// heads) of all rows, elsewhere all features. There the gradient of an activation that all ranks have is a
// share of it: what the ranks have adds up to the gradient. So are those of parameters that no layer here
// cuts, norms for example: the engine adds them up (has_parts.h), and lets the loss, which all ranks compute,
// count on the first one alone. Values are summed in fp32 in one order (tensor::redistribute()), for fp32 and
// bf16 tensors.
//
// Initial values are the whole layer's, which each rank draws and keeps its part of: the same on any group,
// where ranks seed torch's generator alike. All throw ConfigError for sizes that cannot be cut, with the
// numbers of ranks that can share them, and LogicError for no group and inputs of other shapes. Forward and
// backward are collective over the group.
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/nn/joint.h"
#include "trireme/parallel/has_parts.h"

namespace trireme::parallel {

/// Which rows, or tokens, a rank has between cut layers.
enum class Rows {
  kAll,   ///< all of them, with the same values as the other ranks
  kSplit  ///< its own, as SplitRows gives them
};

/// Rows of an activation, one rank after another: (N, D) -> (N / n, D) on each of n ranks, and (B, T, D) ->
/// (B, T / n, D), whose rows are the next B T / n of (B, T, D). So a row is where it was, but its two numbers
/// are not: what depends on the place in a sequence comes before, or inside of cut layers.
class SplitRows : public torch::nn::Module {
 public:
  explicit SplitRows(std::shared_ptr<comm::Group> group);
  /// Rows that all ranks have -> those of this rank. No communication, neither in backward. Throws LogicError
  /// where the ranks do not divide the last dimension but one.
  at::Tensor forward(const at::Tensor& x) const;
  /// The other way round: an all-gather, and in backward a reduce-scatter.
  at::Tensor join(const at::Tensor& rows) const;

 private:
  std::shared_ptr<comm::Group> group_;
};

struct ColumnOptions {
  bool bias = true;
  Rows rows = Rows::kAll;  ///< of the input
  int64_t heads = 0;    ///< the features are those of so many heads, which are not cut; 0: any number is cut
  int64_t packed = 1;   ///< so many matrices one below another, as queries, keys and values; each is cut
  bool uneven = false;  ///< the ranks may have different numbers of features, as a head's of a vocabulary
};

/// torch::nn::Linear with its out features cut: x (..., in) -> (..., out / n), all rows.
class ColumnLinear : public torch::nn::Module, public HasParts {
 public:
  ColumnLinear(int64_t in, int64_t out, std::shared_ptr<comm::Group> group,
               const ColumnOptions& options = {});
  /// With split rows an all-gather, which backward repeats instead of keeping all rows, and in backward a
  /// reduce-scatter.
  at::Tensor forward(const at::Tensor& x) const;
  std::map<std::string, plan::Part> parts() const override;

  at::Tensor weight, bias;  ///< (out / n, in), (out / n); bias undefined without

 private:
  plan::Part part_of(const plan::Shape& whole) const;

  int64_t in_, out_;
  std::shared_ptr<comm::Group> group_;
  ColumnOptions options_;
};

struct RowOptions {
  bool bias = true;
  Rows rows = Rows::kAll;  ///< of the output
  int64_t heads = 0;       ///< as ColumnOptions::heads has it, of the in features
};

/// torch::nn::Linear with its in features cut: x (..., in / n) of all rows -> (..., out), a sum over ranks to
/// which the whole bias is added once.
class RowLinear : public torch::nn::Module, public HasParts {
 public:
  RowLinear(int64_t in, int64_t out, std::shared_ptr<comm::Group> group, const RowOptions& options = {});
  /// An all-reduce, in backward too; with split rows a reduce-scatter, and in backward an all-gather.
  at::Tensor forward(const at::Tensor& x) const;
  std::map<std::string, plan::Part> parts() const override;

  at::Tensor weight, bias;  ///< (out, in / n), (out); bias undefined without

 private:
  int64_t in_, out_;
  std::shared_ptr<comm::Group> group_;
  RowOptions options_;
};

/// torch::nn::Embedding with its rows cut, as evenly as possible: the first ranks have one more.
class VocabParallelEmbedding : public torch::nn::Module, public HasParts {
 public:
  VocabParallelEmbedding(int64_t words, int64_t width, std::shared_ptr<comm::Group> group,
                         Rows rows = Rows::kAll);
  /// indices (..., T) int64, the same on all ranks -> (..., T, width), or (..., T / n, width) with split
  /// rows. An all-reduce, in backward too; with split rows as RowLinear. Throws DataError on a CPU for
  /// indices that no row has, which give zeros on a GPU, and on all ranks LogicError where those of the first
  /// call differ: it alone compares them, since the host waits.
  at::Tensor forward(const at::Tensor& indices) const;
  std::map<std::string, plan::Part> parts() const override;

  at::Tensor weight;  ///< (this rank's words, width)

 private:
  int64_t words_;
  std::shared_ptr<comm::Group> group_;
  Rows rows_;
  mutable bool compared_ = false;
};

/// Mean cross-entropy in nats over a vocabulary of which each rank has its part of the logits, as a
/// ColumnLinear with `uneven` makes them. Ranks exchange three numbers a row, and never logits.
class VocabParallelCrossEntropy : public torch::nn::Module {
 public:
  VocabParallelCrossEntropy(int64_t words, std::shared_ptr<comm::Group> group);
  /// logits (..., this rank's words), targets (...) int64, the same on all ranks -> scalar fp32, the same on
  /// all ranks. Targets of -100 are ignored, as torch does. Throws DataError on a CPU for other targets that
  /// are no words, and LogicError as VocabParallelEmbedding does where ranks have different targets.
  at::Tensor forward(const at::Tensor& logits, const at::Tensor& targets) const;

 private:
  int64_t words_;
  std::shared_ptr<comm::Group> group_;
  nn::JointPtr joint_;
  mutable bool compared_ = false;
};

/// VocabParallelCrossEntropy without an object, so that each call compares targets: `words` is the size of
/// the whole vocabulary.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t words,
                                        const std::shared_ptr<comm::Group>& group);

}  // namespace trireme::parallel
