#include "trireme/plan/spread_head.h"

#include <algorithm>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/plan/large_bytes.h"
#include "trireme/plan/schedule_in_time.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

bool is_input_gradient(const StagePass& pass) {
  return pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput;
}

/// A pass of the schedule as it was, with how many of another kind its rank has run before it.
struct Ordered {
  StagePass pass;
  int64_t backwards = 0, weights = 0;
};

/// The order of passes of the head's parts, which is the same on all ranks.
struct Parts {
  std::vector<int64_t> forward, backward;  ///< micro-batches in the order of the last stage's passes
  int64_t most = 0;                        ///< micro-batches of which a rank may have logits at once
};

Parts parts_of(const Schedule& schedule, int64_t ahead) {
  Parts parts;
  const int64_t last = schedule.stages - 1;
  int64_t now = 0, most = 0;
  for (const StagePass& pass : schedule.ranks[static_cast<size_t>(schedule.rank_of(last, 0))]) {
    if (pass.stage != last) continue;
    if (pass.kind == Kind::kForward) {
      parts.forward.push_back(pass.micro_batch);
      most = std::max(most, ++now);
    } else if (is_input_gradient(pass)) {
      parts.backward.push_back(pass.micro_batch);
      --now;
    }
  }
  parts.most = most + ahead + 1;
  return parts;
}

/// Runs the passes of its schedule in their order, forward, backward and weights each, with forward passes
/// up to `ahead` backward passes before their turn; first of all what all ranks wait for.
class SpreadingRank {
 public:
  SpreadingRank(const Schedule& schedule, const PassCosts&, int64_t rank, int64_t ahead)
      : part_(schedule.stages + rank), ahead_(ahead), parts_(parts_of(schedule, ahead)) {
    int64_t backwards = 0, weights = 0;
    for (StagePass pass : schedule.ranks[static_cast<size_t>(rank)]) {
      pass.with_next = false;
      if (pass.kind == Kind::kForward) {
        forwards_.push_back({pass, backwards, weights});
      } else if (pass.kind == Kind::kBackwardWeight) {
        weights_.push_back(pass);
        ++weights;
      } else {
        backwards_.push_back(pass);
        ++backwards;
      }
    }
  }

  bool done() const {
    return ran_.forwards == forwards_.size() && ran_.backwards == backwards_.size() &&
           ran_.weights == weights_.size() && ran_.part_backwards == parts_.backward.size();
  }

  std::optional<StagePass> choose(const Progress& progress, double time, double) {
    const auto may = [&](const StagePass& pass) { return progress.ready(pass) <= time; };
    if (const auto part = next_part(may)) return part;
    if (ran_.backwards < backwards_.size() && may(backwards_[ran_.backwards]))
      return backwards_[ran_.backwards++];
    if (ran_.forwards < forwards_.size()) {
      const Ordered& next = forwards_[ran_.forwards];
      const bool has_turn = next.backwards <= static_cast<int64_t>(ran_.backwards) + ahead_ &&
                            next.weights <= static_cast<int64_t>(ran_.weights) + ahead_;
      if (has_turn && may(next.pass)) {
        ++ran_.forwards;
        return next.pass;
      }
    }
    if (ran_.weights < weights_.size() && may(weights_[ran_.weights])) return weights_[ran_.weights++];
    return next_part_backward(may);
  }

 private:
  template <typename May>
  std::optional<StagePass> next_part(const May& may) {
    if (ran_.part_forwards == parts_.forward.size()) return std::nullopt;
    const StagePass pass{Kind::kForward, part_, parts_.forward[ran_.part_forwards]};
    if (!may(pass)) return std::nullopt;
    // Its logits take the place of others.
    if (static_cast<int64_t>(ran_.part_forwards - ran_.part_backwards) == parts_.most)
      return next_part_backward(may);
    ++ran_.part_forwards;
    return pass;
  }
  template <typename May>
  std::optional<StagePass> next_part_backward(const May& may) {
    if (ran_.part_backwards == parts_.backward.size()) return std::nullopt;
    const StagePass pass{Kind::kBackward, part_, parts_.backward[ran_.part_backwards]};
    if (!may(pass)) return std::nullopt;
    ++ran_.part_backwards;
    return pass;
  }

  int64_t part_, ahead_;
  Parts parts_;
  std::vector<Ordered> forwards_;
  std::vector<StagePass> backwards_, weights_;
  struct {
    size_t forwards = 0, backwards = 0, weights = 0, part_forwards = 0, part_backwards = 0;
  } ran_;
};

PassCosts with_longer_parts(const Schedule& schedule, PassCosts costs, double stretch) {
  for (auto* values : {&costs.forward, &costs.backward_weight}) {
    if (values->size() == 1) continue;
    for (size_t part = static_cast<size_t>(schedule.stages); part < values->size(); ++part)
      (*values)[part] *= stretch;
  }
  return costs;
}

}  // namespace

Schedule spread_head(const Schedule& schedule, const PassCosts& costs) {
  if (schedule.placement == Placement::kTwoWays) {
    throw ConfigError(
        "[plan.spread_head] {} has a copy of each stage on two ranks, and micro-batches leave the model on "
        "two of them: all ranks would have to serve both directions at once; take a schedule of stages that "
        "go one way (dualpipe_v, 1f1b), or leave the head with the last stage (pipeline.spread_head=false)",
        schedule.name);
  }
  Schedule given = schedule;
  given.spread_head = true;
  constexpr double kAlmost = 1.005;
  // Ranks choose without looking ahead, so what is decided in favour of slightly other times is often better.
  constexpr double kStretches[] = {1.0, 1.3, 1.6, 2.0};
  const int64_t most_ahead = 2 * schedule.stages_per_rank();
  PassCosts without_limit = costs;
  without_limit.memory_limit = 0.0;
  std::vector<Schedule> made;
  std::vector<double> seconds;
  for (int64_t ahead = 0; ahead <= most_ahead; ++ahead) {
    bool any_fits = false;
    for (const double stretch : kStretches) {
      Schedule next =
          scheduled_in_time<SpreadingRank>(given, with_longer_parts(given, costs, stretch), ahead);
      const Simulation simulation = simulate(next, without_limit);
      const double peak = std::ranges::max(simulation.ranks, {}, &RankTimeline::peak_bytes).peak_bytes;
      if (!made.empty() && !fits(peak, costs)) continue;
      any_fits = true;
      made.push_back(std::move(next));
      seconds.push_back(simulation.makespan);
    }
    if (!any_fits) break;
  }
  const double shortest = *std::ranges::min_element(seconds);
  const auto chosen = std::ranges::find_if(seconds, [&](double each) { return each <= kAlmost * shortest; });
  return made[static_cast<size_t>(chosen - seconds.begin())];
}

PassCosts with_head_parts(const Schedule& schedule, PassCosts costs, double forward, double backward,
                          double activation_bytes) {
  const auto ranks = schedule.ranks.size(), stages = static_cast<size_t>(schedule.stages);
  const double share = 1.0 / static_cast<double>(ranks);
  const auto extend = [&](std::vector<double>& values, double of_part) {
    if (values.size() == 1) values.resize(stages, values.front());
    values.resize(stages + ranks, of_part);
  };
  extend(costs.forward, forward * share);
  extend(costs.backward_input, 0.0);
  extend(costs.backward_weight, backward * share);
  extend(costs.activation_bytes, activation_bytes);
  if (!costs.between_halves_bytes.empty()) extend(costs.between_halves_bytes, activation_bytes);
  return costs;
}

HeadPartBytes head_part_bytes(int64_t tokens, int64_t rows, int64_t width, int64_t element_bytes) {
  constexpr double kStats = 3 * 4, kInMessage = 16;  // fp32; the same in a row that begins at 16 bytes
  constexpr double kTarget = 8;
  const auto element = static_cast<double>(element_bytes);
  const double part = 2.0 * static_cast<double>(width) * element + kInMessage;
  const auto bytes = [&](double of_token) { return at_most_62_bits(static_cast<double>(tokens) * of_token); };
  return {.part = bytes(part),
          .totals = bytes(kStats),
          .kept = bytes(static_cast<double>(rows) * element + part + kStats + kTarget)};
}

}  // namespace trireme::plan
