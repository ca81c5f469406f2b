#include "trireme/plan/step_builder.h"

#include <utility>

namespace trireme::plan {

void StepBuilder::begin_pass(Pass::Kind kind, int64_t micro_batch) {
  if (!program_.passes.empty()) program_.passes.back().end = next();
  program_.passes.push_back({kind, micro_batch, next(), next()});
  micro_batch_ = micro_batch;
}

int64_t StepBuilder::add(ActionKind kind, int64_t unit, Lane lane, std::vector<Transfer> transfers) {
  std::erase_if(transfers, [](const Transfer& transfer) { return transfer.ranks == 1; });
  program_.actions.push_back({kind, unit, micro_batch_, lane, std::move(transfers)});
  return next() - 1;
}

void StepBuilder::wait_for(int64_t awaited) {
  const int64_t unit = program_.actions[static_cast<size_t>(awaited)].unit;
  program_.actions.push_back(
      {.kind = ActionKind::kWait, .unit = unit, .micro_batch = micro_batch_, .awaits = awaited});
}

void StepBuilder::open(Role role, int64_t unit, int64_t bytes, int64_t micro_batch) {
  open_.emplace(Key{role, unit, micro_batch}, program_.buffers.size());
  program_.buffers.push_back({role, unit, micro_batch, bytes, {}, next(), next()});
}

void StepBuilder::close(Role role, int64_t unit, int64_t micro_batch) {
  const auto found = open_.find({role, unit, micro_batch});
  if (found == open_.end()) return;
  program_.buffers[found->second].to = next() - 1;
  open_.erase(found);
}

StepProgram StepBuilder::take() {
  if (!program_.passes.empty()) program_.passes.back().end = next();
  for (const auto& [key, place] : open_) program_.buffers[place].to = next() - 1;
  open_.clear();
  return std::move(program_);
}

}  // namespace trireme::plan
