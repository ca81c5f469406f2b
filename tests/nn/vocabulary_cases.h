#pragma once
// A head in one piece, in double, beside the same in parts of the vocabulary.
#include <ATen/ATen.h>

#include <vector>

#include "trireme/nn/vocabulary_part.h"

namespace trireme::nn {

/// x (..., D), weight (V, D), targets of the tokens.
struct HeadCase {
  at::Tensor x, weight, targets;
};

struct HeadOutcome {
  at::Tensor loss, d_x, d_weight;
};

inline HeadOutcome in_one_piece(const HeadCase& given, double scale) {
  const at::Tensor x = given.x.to(at::kDouble).requires_grad_(true),
                   weight = given.weight.to(at::kDouble).requires_grad_(true);
  const at::Tensor rows = at::matmul(x, weight.t()).reshape({-1, weight.size(0)});
  const at::Tensor loss = at::cross_entropy_loss(rows, given.targets.reshape({-1}));
  (loss * scale).backward();
  return {loss.detach(), x.grad(), weight.grad()};
}

/// Part i has the rows from first[i] to first[i + 1].
inline HeadOutcome in_parts(const HeadCase& given, const std::vector<int64_t>& first, double scale,
                            int64_t chunk_bytes = kLossChunkBytes) {
  std::vector<at::Tensor> messages, weights;
  std::vector<VocabularyPart> parts;
  for (size_t i = 0; i + 1 < first.size(); ++i) {
    weights.push_back(
        given.weight.narrow(0, first[i], first[i + 1] - first[i]).detach().clone().requires_grad_(true));
    parts.push_back(vocabulary_part(given.x, weights.back(), first[i],
                                    {.targets = given.targets, .chunk_bytes = chunk_bytes}));
    messages.push_back(parts.back().message);
  }
  const JoinedVocabulary joined = join_vocabulary(messages, given.targets, given.x.size(-1), scale);
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].stats.backward(joined.totals);
    gradients.push_back(weights[i].grad());
  }
  return {joined.loss, joined.gradient.view(given.x.sizes()), at::cat(gradients)};
}

}  // namespace trireme::nn
