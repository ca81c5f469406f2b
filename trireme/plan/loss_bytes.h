#pragma once
// Bytes that the loss takes beside the activations of a micro-batch.
#include <cstdint>

#include "trireme/plan/large_bytes.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"

namespace trireme::plan {

/// Bytes that the loss of a micro-batch holds.
struct LossBytes {
  int64_t at_work = 0;        ///< while it is made
  int64_t kept = 0;           ///< from then to its backward pass
  int64_t at_work_again = 0;  ///< in its backward pass
  int64_t of(int64_t in_flight) const { return bounded_sum({at_work, bounded_product(in_flight, kept)}); }
};

/// The bytes of a rank of `config` (complete) which makes the loss, of a model in one piece or in the stages
/// of `plan`. `facts`: of what it has; tokens: of a micro-batch, of which it has all features. The program of
/// a part of a head that is spread has the logits themselves.
LossBytes loss_of_rank(const Config& config, const ModelFacts& facts, int64_t tokens, Device device,
                       const PipelinePlan& plan, int64_t pp_rank);

}  // namespace trireme::plan
