#pragma once
// A language model's head spread over all ranks of a pipeline (Yeung et al. 2024, Balancing Pipeline
// Parallelism with Vocabulary Parallelism): each rank has some rows of its weight, which is a stage of its
// own. Forward of such a part computes logits, and what the gradient of the last stage's output needs of
// them, so that ranks meet once; backward computes the gradient of the part's weight, and nobody waits for
// it.
#include <cstdint>

#include "trireme/plan/simulate.h"

namespace trireme::plan {

/// `schedule` with the passes of the parts of the head. The passes that it has stay in its order, forward and
/// backward ones each, and forward passes of parts come as soon as they can. Since the last stage waits for
/// all parts before its backward pass, a rank may run ahead of the schedule by up to two micro-batches'
/// forward passes, 2 v of its v stages, by as few as make the step almost as short as it can be for these
/// costs. These are given for all_stages() of the result; no rank runs ahead beyond their limit of memory. A
/// rank has logits of at most 2 v + 1 more micro-batches than the last stage had in flight. Throws
/// ConfigError where two ranks have a copy of each stage, and as simulate().
Schedule spread_head(const Schedule& schedule, const PassCosts& costs);

/// Costs of stages with those of a head whose passes take `forward` and `backward` on one rank: a part takes
/// its share of them.
PassCosts with_head_parts(const Schedule& schedule, PassCosts costs, double forward, double backward,
                          double activation_bytes);

/// Bytes of what a part of the head and the last stage send each other for a micro-batch of `tokens`, and of
/// what a part of `rows` rows keeps of it from its forward to its backward pass, beside its input: logits in
/// the dtype of computation, targets, sums, and its message, until that has left.
struct HeadPartBytes {
  int64_t part = 0, totals = 0, kept = 0;
};
HeadPartBytes head_part_bytes(int64_t tokens, int64_t rows, int64_t width, int64_t element_bytes);

}  // namespace trireme::plan
