#include "trireme/train/stage_plan.h"

#include <fmt/format.h>

#include "trireme/plan/buckets.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/vision_model.h"

namespace trireme::train {
namespace {

/// A stage saves what it has of the tensors of `units`, but for copies.
void add_saved(StagePlan& plan, int64_t stage, const std::vector<plan::UnitSpec>& units,
               const plan::ModelConfig& model) {
  for (const plan::UnitSpec& unit : units) {
    for (const plan::ParamSpec& param : unit.params) {
      if (param.part.copy == 0)
        plan.params[param.name].push_back({stage, param.shape, param.part, param.frozen});
    }
  }
  if (!plan::reads_images(model.family)) return;
  for (const plan::BufferSpec& buffer : plan::buffers_of(model.vision, units))
    plan.buffers[buffer.name] = {.stage = stage, .shape = buffer.shape};
}

/// Engines of stages have roots and parts of the head of equal names.
void add_stage(StagePlan& plan, int64_t stage, const plan::ModelConfig& model,
               const plan::ModelFacts& facts) {
  const plan::Schedule& schedule = plan.pipeline->schedule;
  const auto units = plan::stage_units(model, facts, plan::units_of_stage(plan.pipeline->split, stage));
  plan.holders.push_back({schedule.rank_of(stage, 0), schedule.rank_of(stage, schedule.micro_batches - 1)});
  plan.first_unit.push_back(std::ssize(plan.units));
  for (const plan::UnitSpec& unit : units) {
    const bool repeats = unit.name == plan::kRootUnit || schedule.is_head_part(stage);
    plan.units.push_back(repeats ? fmt::format("{} of stage {}", unit.name, stage) : unit.name);
  }
  add_saved(plan, stage, units, model);
}

}  // namespace

StagePlan plan_stages(const plan::Config& config, const plan::ModelFacts& facts, const plan::ModelFacts& held,
                      const plan::BatchPlan& batch) {
  StagePlan plan;
  if (config.parallel.pp > 1) {
    plan.pipeline = plan::plan_pipeline(config, batch);
    const int64_t stages = plan.pipeline->schedule.all_stages();
    for (int64_t stage = 0; stage < stages; ++stage) add_stage(plan, stage, config.model, facts);
    return plan;
  }
  plan.holders = {{0}};
  plan.first_unit = {0};
  for (const plan::UnitSpec& unit : plan::engine_units(config, held)) plan.units.push_back(unit.name);
  add_saved(plan, 0, facts.units, config.model);
  return plan;
}

}  // namespace trireme::train
