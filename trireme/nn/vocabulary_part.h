#pragma once
// The head of a language model in parts of the vocabulary, of which one computes logits and what others need
// of them (Yeung et al. 2024, Balancing Pipeline Parallelism with Vocabulary Parallelism): each part makes
// its share of the gradient of its input before the sums over the whole vocabulary are known, and whoever has
// all parts multiplies them by what was missing. So parts and the one that joins them meet once. Nothing here
// communicates.
//
//   N tokens, D features, R rows of the vocabulary from row `first` on
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trireme/nn/model.h"

namespace trireme::nn {

struct VocabularyPart {
  /// (3, N) fp32: the largest logit of a token, the sum of the exponentials of its logits less that, and the
  /// target's logit: -inf where that is in another part, and NaN for one of -inf. Backward with
  /// JoinedVocabulary::totals in place of its gradient gives the weight's gradient, and none of the input.
  at::Tensor stats;
  /// (N, 2 D + k), in the input's dtype, for join_vocabulary(): exponentials times weight without the
  /// target's, the target's row of the weight, and in k, 16 bytes, stats. Undefined where gradients are off.
  at::Tensor message;
};

/// x (..., D) and weight (R, D) of one dtype, fp32, bf16 or fp16; targets int64 as LossTarget has them.
/// Products are those of that dtype, sums over the vocabulary fp32. For backward x and the logits (N, R) are
/// kept, in that dtype; what is made of the logits takes at most `target.chunk_bytes` at a time.
/// Throws LogicError where there are not as many targets as tokens.
VocabularyPart vocabulary_part(const at::Tensor& x, const at::Tensor& weight, int64_t first,
                               const LossTarget& target);

struct JoinedVocabulary {
  at::Tensor loss;      ///< mean cross-entropy in nats, scalar fp32; as cross_entropy() has ignored targets
  at::Tensor gradient;  ///< (N, D) of x, times `scale`, in the dtype of the messages
  at::Tensor totals;    ///< (3, N) fp32, contiguous: what a part's backward pass takes
};
/// The messages of all parts, in any order, which have `width` features. Throws DataError on a CPU for a
/// target that no part has; on a GPU the loss is infinite.
JoinedVocabulary join_vocabulary(const std::vector<at::Tensor>& messages, const at::Tensor& targets,
                                 int64_t width, double scale);
/// The loss alone of the stats (parts, 3, N) of all parts.
at::Tensor joined_loss(const at::Tensor& stats, const at::Tensor& targets);

/// linear_cross_entropy() with a vocabulary that is cut over the ranks of `joint`, which exchange three
/// numbers a token and never logits: x (B, T / n, D) are this rank's rows, weight (R, D) its part of the
/// vocabulary, targets those of all rows. Gradients are made in the forward pass, part by part of the rows,
/// and kept for this rank's rows alone. Every rank gets the loss of all rows. Collective over the joint.
at::Tensor cut_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const LossTarget& target,
                             const JointPtr& joint);

/// Mean cross-entropy of logits (..., R), this rank's part of the vocabulary, of fp32, bf16 or fp16, for
/// targets (...) of all rows, which every rank has. Ranks exchange three numbers a row. Every rank gets the
/// loss; backward takes a gradient that all ranks have. For backward the logits are kept in their dtype; what
/// is made of them takes at most `target.chunk_bytes` at a time. Collective over the joint, in forward alone.
/// Throws LogicError where there are not as many targets as rows, and DataError as join_vocabulary().
at::Tensor cut_cross_entropy(const at::Tensor& logits, const LossTarget& target, const JointPtr& joint);

}  // namespace trireme::nn
