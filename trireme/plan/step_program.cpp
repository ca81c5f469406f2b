#include "trireme/plan/step_program.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/step_writer.h"

namespace trireme::plan {

std::optional<ActionKind> computing(Pass::Kind pass) {
  switch (pass) {
    case Pass::Kind::kForward:
      return ActionKind::kForward;
    case Pass::Kind::kBackward:
      return ActionKind::kBackward;
    case Pass::Kind::kBackwardInput:
      return ActionKind::kBackwardInput;
    case Pass::Kind::kBackwardWeight:
      return ActionKind::kBackwardWeight;
    case Pass::Kind::kUpdate:
    case Pass::Kind::kTransfer:
    case Pass::Kind::kReduce:
    case Pass::Kind::kSumTied:
      break;
  }
  return std::nullopt;
}

std::vector<ProgramUnit> program_units(const std::vector<UnitSpec>& units, const EngineSetting& setting,
                                       const std::vector<int64_t>& activation_bytes) {
  std::vector<ProgramUnit> result;
  for (const UnitSpec& unit : units) {
    const size_t place = result.size();
    result.push_back(
        {.name = unit.name,
         .numel = flat_layout(unit, setting.mesh.dp_size()).numel(),
         .trainable = unit.params.empty() || !std::ranges::all_of(unit.params, &ParamSpec::frozen),
         .activation_bytes = place < activation_bytes.size() ? activation_bytes[place] : 0,
         .fp8 = fp8_unit(unit),
         .frozen = frozen_layout(unit, setting.mesh.dp_size()).numel(),
         .nf4 = nf4_unit(unit)});
  }
  return result;
}

UseOrder declared_order(const std::vector<ProgramUnit>& units, UseFrom use_from) {
  using Event = UseOrder::Event;
  UseOrder order;
  if (use_from == UseFrom::kBuckets) {
    for (int64_t unit = 0; unit < std::ssize(units); ++unit)
      order.backward.push_back({Event::Kind::kComplete, unit});
    return order;
  }
  for (int64_t unit = 0; unit < std::ssize(units); ++unit) order.forward.push_back(unit);
  // Backward ends in the first unit that is trained: the input of that one needs no gradient.
  const int64_t first = std::ranges::find_if(units, &ProgramUnit::trainable) - units.begin();
  for (int64_t unit = std::ssize(units); unit-- > first;) {
    if (unit > 0) order.backward.push_back({Event::Kind::kBegin, unit});
    if (units[static_cast<size_t>(unit)].trainable) order.backward.push_back({Event::Kind::kComplete, unit});
    if (unit > first) order.backward.push_back({Event::Kind::kEnd, unit});
  }
  return order;
}

StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order) {
  StepWriter writer(units, setting, order);
  for (int64_t micro_batch = 0; micro_batch < setting.accumulation; ++micro_batch) {
    writer.forward_pass(micro_batch);
    writer.backward_pass(micro_batch, micro_batch + 1 == setting.accumulation);
  }
  writer.update_pass();
  return writer.take();
}

StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order, const std::vector<EnginePass>& passes, bool held) {
  StepWriter writer(units, setting, order);
  if (held) writer.hold(true);
  for (const EnginePass& pass : passes) {
    switch (pass.kind) {
      case ActionKind::kForward:
        writer.forward_pass(pass.micro_batch);
        break;
      case ActionKind::kBackward:
        writer.backward_pass(pass.micro_batch, pass.last);
        break;
      case ActionKind::kBackwardInput:
        writer.backward_input_pass(pass.micro_batch);
        break;
      case ActionKind::kBackwardWeight:
        writer.backward_weight_pass(pass.micro_batch);
        break;
      case ActionKind::kReduce:
        writer.reduce_pass();
        break;
      default:
        throw LogicError("[plan.step_program] a pass of kind {} is not one of an engine", pass.kind);
    }
  }
  if (held) writer.hold(false);
  writer.update_pass();
  return writer.take();
}

StepProgram inference_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                              const UseOrder& order) {
  StepWriter writer(units, setting, order);
  writer.forward_pass(Action::kOnceAStep);
  return writer.take();
}

}  // namespace trireme::plan
