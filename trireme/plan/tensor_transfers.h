#pragma once
// What ranks along tp and cp exchange in the actions of a step program: activations in passes (nn/joint.h,
// nn/context.h), and gradients of copies where a unit is reduced.
#include <vector>

#include "trireme/plan/batch.h"
#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// Adds them to the actions of `program`, whose units are `units`: those of the model whose `facts` these
/// are, some of them, or buckets. Nothing where the model is whole.
void add_tensor_transfers(StepProgram& program, const std::vector<UnitSpec>& units, const Config& config,
                          const ModelFacts& facts, const BatchPlan& batch);

}  // namespace trireme::plan
