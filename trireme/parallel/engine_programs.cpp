#include "trireme/parallel/engine_programs.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::parallel {

using plan::Pass;
using plan::UseFrom;

EnginePrograms::EnginePrograms(const Units& units, const plan::EngineSetting& setting)
    : units_(units), setting_(setting) {
  setting_.accumulation = 2;
  write();
}

std::vector<plan::ProgramUnit> EnginePrograms::program_units() const {
  std::vector<plan::ProgramUnit> units;
  for (const auto& unit : units_)
    units.push_back({.name = unit->name(),
                     .numel = unit->layout().numel(),
                     .trainable = unit->trainable(),
                     .fp8 = unit->fp8()});
  return units;
}

/// Until ranks have agreed on another order, the units that come last in a forward pass are reduced first.
plan::UseOrder EnginePrograms::order_of(const std::vector<plan::ProgramUnit>& units) {
  if (!recorded_ && setting_.use_from != UseFrom::kOperators) {
    const plan::UseOrder declared = declared_order(units, setting_.use_from);
    order_.forward = declared.forward;
    order_.backward = declared.backward;
  }
  plan::UseOrder order = order_;
  if (order.reductions.empty()) {
    for (size_t unit = units.size(); unit-- > 0;) order.reductions.push_back(static_cast<int64_t>(unit));
    if (setting_.use_from == UseFrom::kBuckets) std::ranges::reverse(order.reductions);
  }
  std::erase_if(order.reductions, [&](int64_t unit) { return !units[static_cast<size_t>(unit)].trainable; });
  return order;
}

void EnginePrograms::write() {
  const std::vector<plan::ProgramUnit> units = program_units();
  const plan::UseOrder order = order_of(units);
  step_ = std::make_shared<plan::StepProgram>(step_program(units, setting_, order));
  inference_ = std::make_shared<plan::StepProgram>(inference_program(units, setting_, order));
  const std::vector<plan::EnginePass> apart = {{.kind = Pass::Kind::kBackwardWeight, .micro_batch = 0},
                                               {.kind = Pass::Kind::kReduce}};
  apart_ = std::make_shared<plan::StepProgram>(step_program(units, setting_, order, apart, /*held=*/false));
}

Turn EnginePrograms::next(const Program& own, Pass::Kind kind, int64_t micro_batch) {
  if (given_) return *std::exchange(given_, {});
  const auto pass = std::ranges::find_if(own->passes, [&](const Pass& candidate) {
    return candidate.kind == kind && candidate.micro_batch == micro_batch;
  });
  TRIREME_CHECK(pass != own->passes.end(), "[parallel.engine_programs] there is no {} pass", kind);
  return {own, &*pass};
}

Turn EnginePrograms::forward(bool trains) {
  return next(trains ? step_ : inference_, Pass::Kind::kForward, trains ? 0 : plan::Action::kOnceAStep);
}

Turn EnginePrograms::backward(bool last) {
  return next(step_, Pass::Kind::kBackward, last ? 1 : 0);
}

void EnginePrograms::follow(const plan::UseOrder& seen) {
  if (recorded_ && seen.forward == order_.forward && seen.backward == order_.backward) return;
  recorded_ = true;
  order_.forward = seen.forward;
  order_.backward = seen.backward;
  write();
}

void EnginePrograms::set_reductions(std::vector<int64_t> order) {
  order_.reductions = std::move(order);
  write();
}

void EnginePrograms::follow_freezing() {
  if (setting_.gathers()) recorded_ = false;
  write();
}

void EnginePrograms::stay_in_place() {
  setting_.stays = true;
  write();
}

}  // namespace trireme::parallel
