#pragma once
// How a model is cut into the stages of a pipeline, by what its parts cost.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// A part of a model that stays in one stage.
struct StagePart {
  std::string name;    ///< of the unit
  double flops = 0.0;  ///< forward, for a token
  int64_t params = 0;  ///< of a tied head its copy of the embeddings
};

/// Embeddings with the first block, the other blocks, the head; `model` is complete, `facts` are its. With
/// `spread_head` the head's product is no part: every stage computes a share of the vocabulary.
std::vector<StagePart> stage_parts(const ModelConfig& model, const ModelFacts& facts,
                                   bool spread_head = false);

struct StageSplit {
  std::vector<int64_t> first;  ///< part with which each stage begins; one more than there are stages
  std::vector<double> flops;   ///< forward, for a token, by stage
  /// The share of the work in the stage that has most of it.
  double busiest_share() const;
};

/// Cuts where the largest stage is smallest. Throws ConfigError when there are more stages than parts.
StageSplit split_by_cost(const std::vector<StagePart>& parts, int64_t stages, double spread_flops = 0.0);
/// As many blocks in each stage as in the others, or one more, and the head with the last.
StageSplit split_evenly(const std::vector<StagePart>& parts, int64_t stages, double spread_flops = 0.0);

/// Forward FLOPs for a token of the head's product.
double head_flops(const ModelConfig& model);

}  // namespace trireme::plan
