#pragma once
// The stages of a model as every rank knows them: their units, the ranks that have them, and which of them
// saves which tensor. A model in one piece is one stage.
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"

namespace trireme::train {

struct StagePlan {
  /// The part of a tensor that a stage saves.
  struct Saved {
    int64_t stage = 0;
    plan::Shape shape = {};  ///< of what it has
    plan::Part part = {};
    bool frozen = false;  ///< for good
  };

  std::optional<plan::PipelinePlan> pipeline = {};  ///< none: there is one stage
  /// Ranks of a pipeline that have a stage, by stage, in the order of its data-parallel ranks.
  std::vector<std::set<int64_t>> holders = {};
  std::vector<std::string> units = {};   ///< names, of one stage after the other
  std::vector<int64_t> first_unit = {};  ///< in units, by stage
  std::map<std::string, std::vector<Saved>> params = {};
  std::map<std::string, Saved> buffers = {};

  int64_t stages() const { return std::ssize(holders); }
};

/// `config` is complete, `facts` are of its model, and `held` of what this rank has of it. Throws as
/// plan::plan_pipeline().
StagePlan plan_stages(const plan::Config& config, const plan::ModelFacts& facts, const plan::ModelFacts& held,
                      const plan::BatchPlan& batch);

}  // namespace trireme::train
