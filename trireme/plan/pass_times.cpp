#include "trireme/plan/pass_times.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::plan {

using Kind = ActionKind;

double of_stage(const std::vector<double>& values, int64_t stage) {
  return values.size() == 1 ? values.front() : values.at(static_cast<size_t>(stage));
}

double duration(const StagePass& pass, const PassCosts& costs) {
  const double input = of_stage(costs.backward_input, pass.stage),
               weight = of_stage(costs.backward_weight, pass.stage);
  switch (pass.kind) {
    case Kind::kForward:
      return of_stage(costs.forward, pass.stage);
    case Kind::kBackward:
      return input + weight;
    case Kind::kBackwardInput:
      return input;
    case Kind::kBackwardWeight:
      return weight;
    default:
      return 0.0;
  }
}

namespace {

double between_halves_of(int64_t stage, const PassCosts& costs) {
  const auto& bytes = costs.between_halves_bytes;
  return of_stage(bytes.empty() ? costs.activation_bytes : bytes, stage);
}

}  // namespace

double most_of_stage(int64_t stage, const PassCosts& costs) {
  return std::max(of_stage(costs.activation_bytes, stage), between_halves_of(stage, costs));
}

void check_lengths(const Schedule& schedule, const PassCosts& costs) {
  const auto stages = static_cast<size_t>(schedule.all_stages());
  for (const auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight,
                             &costs.activation_bytes, &costs.between_halves_bytes}) {
    if (values == &costs.between_halves_bytes && values->empty()) continue;
    if (values->size() != 1 && values->size() != stages) {
      throw ConfigError(
          "[plan.simulate] there are {} costs for {} stages; give one for all stages, or one for each",
          values->size(), stages);
    }
  }
}

bool fits(double bytes, const PassCosts& costs) {
  return costs.memory_limit <= 0.0 || bytes <= costs.memory_limit * (1.0 + 1e-9);
}

double growth(const StagePass& pass, const PassCosts& costs) {
  const double activations = of_stage(costs.activation_bytes, pass.stage),
               between_halves = between_halves_of(pass.stage, costs);
  switch (pass.kind) {
    case Kind::kForward:
      return activations;
    case Kind::kBackward:
      return -activations;
    case Kind::kBackwardInput:
      return between_halves - activations;
    case Kind::kBackwardWeight:
      return -between_halves;
    default:
      return 0.0;
  }
}

double Progress::ready(const StagePass& pass) const {
  const int64_t stage = pass.stage, micro_batch = pass.micro_batch, last = schedule_.stages - 1;
  switch (pass.kind) {
    case Kind::kForward:
      if (stage == 0) return 0.0;
      return arrival(forward_, std::min(stage - 1, last), stage, micro_batch);
    case Kind::kBackward:
    case Kind::kBackwardInput: {
      double ready = forward_[at(stage, micro_batch)];
      if (stage != last)
        return std::max(ready, arrival(input_, std::min(stage + 1, last), stage, micro_batch));
      for (int64_t part = schedule_.stages; part < schedule_.all_stages(); ++part)
        ready = std::max(ready, arrival(forward_, part, stage, micro_batch));
      return ready;
    }
    case Kind::kBackwardWeight:
      return input_[at(stage, micro_batch)];
    default:
      return kNever;
  }
}

bool Progress::has_run(const StagePass& pass) const {
  const size_t place = at(pass.stage, pass.micro_batch);
  switch (pass.kind) {
    case Kind::kForward:
      return forward_[place] < kNever;
    case Kind::kBackward:
      return input_[place] < kNever || weight_[place] < kNever;
    case Kind::kBackwardInput:
      return input_[place] < kNever;
    case Kind::kBackwardWeight:
      return weight_[place] < kNever;
    default:
      return false;
  }
}

void Progress::end(const StagePass& pass, double time) {
  const size_t place = at(pass.stage, pass.micro_batch);
  if (pass.kind == Kind::kForward) forward_[place] = time;
  if (pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput) input_[place] = time;
  if (pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardWeight) weight_[place] = time;
}

double Progress::arrival(const std::vector<double>& ends, int64_t from, int64_t to,
                         int64_t micro_batch) const {
  const bool travels = schedule_.rank_of(from, micro_batch) != schedule_.rank_of(to, micro_batch);
  return ends[at(from, micro_batch)] + (travels ? costs_.transfer : 0.0);
}

double RankClock::run(const StagePass& pass, double begin, double seconds, const PassCosts& costs) {
  const double end = begin + seconds;
  if (timeline_.passes.empty()) timeline_.first = begin;
  if (begin >= free_at_) timeline_.busy += seconds;
  timeline_.passes.push_back({pass, begin, end});
  timeline_.last = free_at_ = end;
  held_ += growth(pass, costs);
  promised_ += growth(pass, costs);
  const double added = most_of_stage(pass.stage, costs) - of_stage(costs.activation_bytes, pass.stage);
  if (pass.kind == Kind::kForward) promised_ += added;
  if (pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput) promised_ -= added;
  timeline_.peak_bytes = std::max(timeline_.peak_bytes, held_);
  return end;
}

}  // namespace trireme::plan
