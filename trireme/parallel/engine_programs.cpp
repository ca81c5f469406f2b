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

void EnginePrograms::take_units() {
  program_units_.clear();
  for (const auto& unit : units_)
    program_units_.push_back({.name = unit->name(),
                              .numel = unit->layout().numel(),
                              .trainable = unit->trainable(),
                              .fp8 = unit->fp8(),
                              .frozen = unit->frozen() ? unit->frozen()->layout().numel() : 0,
                              .nf4 = unit->nf4()});
}

/// Until ranks have agreed on another order, the units that come last in a forward pass are reduced first.
void EnginePrograms::take_order() {
  if (!recorded_ && setting_.use_from != UseFrom::kOperators) {
    const plan::UseOrder declared = declared_order(program_units_, setting_.use_from);
    order_.forward = declared.forward;
    order_.backward = declared.backward;
  }
  written_ = order_;
  std::vector<int64_t>& reductions = written_.reductions;
  if (reductions.empty()) {
    for (size_t unit = units_.size(); unit-- > 0;) reductions.push_back(static_cast<int64_t>(unit));
    if (setting_.use_from == UseFrom::kBuckets) std::ranges::reverse(reductions);
  }
  std::erase_if(reductions,
                [this](int64_t unit) { return !program_units_[static_cast<size_t>(unit)].trainable; });
}

void EnginePrograms::write() {
  ++version_;
  given_update_.reset();
  take_units();
  take_order();
  const auto shared = [](plan::StepProgram program) {
    return std::make_shared<const plan::StepProgram>(std::move(program));
  };
  step_ = shared(step_program(program_units_, setting_, written_));
  inference_ = shared(inference_program(program_units_, setting_, written_));
  const std::vector<plan::EnginePass> apart = {{.kind = plan::ActionKind::kBackwardWeight, .micro_batch = 0},
                                               {.kind = plan::ActionKind::kReduce}};
  apart_ = shared(step_program(program_units_, setting_, written_, apart, /*held=*/false));
}

Turn EnginePrograms::next(const Program& own, Pass::Kind kind, int64_t micro_batch) {
  if (given_ && (given_->pass->kind == kind ||
                 (kind == Pass::Kind::kBackward && given_->pass->kind == Pass::Kind::kBackwardInput)))
    return *given_;
  const auto pass = std::ranges::find_if(own->passes, [&](const Pass& candidate) {
    return candidate.kind == kind && candidate.micro_batch == micro_batch;
  });
  TRIREME_CHECK(pass != own->passes.end(), "[parallel.engine_programs] there is no {} pass", kind);
  return {own, &*pass};
}

void EnginePrograms::take_step(plan::StepProgram step, int64_t micro_batches) {
  TRIREME_CHECK(std::ranges::equal(step.units, program_units_, {}, &plan::ProgramUnit::numel,
                                   &plan::ProgramUnit::numel),
                "[parallel.engine_programs] the program is for other units than the {} of this engine",
                program_units_.size());
  step_ = std::make_shared<const plan::StepProgram>(std::move(step));
  micro_batches_ = micro_batches;
  pin();
}

/// Only who ends a step knows that its own program is at the last micro-batch; with a program that was given
/// a step has its number of them.
int64_t EnginePrograms::shown_micro_batch(bool last) const {
  const int64_t shown = std::min(micro_batches_, plan::StepProgram::kMicroBatchesShown);
  if (last || (pinned_ && micro_batch_ + 1 == micro_batches_)) return shown - 1;
  return pinned_ ? std::min(micro_batch_, std::max<int64_t>(0, shown - 2)) : 0;
}

Turn EnginePrograms::forward(bool trains) {
  if (!trains) return next(inference_, Pass::Kind::kForward, plan::Action::kOnceAStep);
  return next(step_, Pass::Kind::kForward, shown_micro_batch(/*last=*/false));
}

Turn EnginePrograms::backward(bool last) {
  Turn turn = next(step_, Pass::Kind::kBackward, shown_micro_batch(last));
  ++micro_batch_;
  return turn;
}

Turn EnginePrograms::update() {
  begin_step();
  if (given_update_) return *given_update_;
  return next(step_, Pass::Kind::kUpdate, plan::Action::kOnceAStep);
}

/// A pass for the input alone completes the gradients of some units, which says nothing of whole ones.
void EnginePrograms::follow(const plan::UseOrder& seen, Pass::Kind back) {
  if (pinned_ || (back == Pass::Kind::kBackwardInput && setting_.use_from != UseFrom::kOperators)) return;
  const bool same = seen.forward == order_.forward && seen.backward == order_.backward;
  recorded_ = true;
  if (same) return;
  order_.forward = seen.forward;
  order_.backward = seen.backward;
  write();
}

void EnginePrograms::set_reductions(std::vector<int64_t> order) {
  if (pinned_) return;
  order_.reductions = std::move(order);
  write();
}

void EnginePrograms::follow_freezing() {
  TRIREME_CHECK(
      !pinned_,
      "[parallel.engine_programs] parameters were frozen or thawed, but the program that this run was "
      "given says which are trained; go on without it");
  if (setting_.gathers()) recorded_ = false;
  write();
}

void EnginePrograms::stay_in_place() {
  setting_.stays = true;
  write();
}

}  // namespace trireme::parallel
