// Schedules for given costs: what is ready first.
#include <algorithm>
#include <deque>
#include <optional>
#include <ranges>

#include "trireme/plan/schedule_in_time.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// The weights that a rank has put off, in the order of their inputs.
class PutOff {
 public:
  void ran(const StagePass& pass) {
    if (pass.kind == Kind::kBackwardInput)
      weights_.push_back({Kind::kBackwardWeight, pass.stage, pass.micro_batch});
  }
  std::optional<StagePass> take() {
    if (weights_.empty()) return std::nullopt;
    const StagePass weight = weights_.front();
    weights_.pop_front();
    return weight;
  }
  bool empty() const { return weights_.empty(); }

 private:
  std::deque<StagePass> weights_;
};

/// Runs its passes in their order; while the next one cannot run, runs passes for the weights.
class FillingRank {
 public:
  FillingRank(const Schedule& schedule, const PassCosts& costs, int64_t rank)
      : passes_(schedule.ranks[static_cast<size_t>(rank)]), costs_(costs) {}

  bool done() const { return next_ == passes_.size() && weights_.empty(); }
  std::optional<StagePass> choose(const Progress& progress, double time, double promised) {
    if (next_ == passes_.size()) return weights_.take();
    const StagePass& pass = passes_[next_];
    const bool has_room =
        pass.kind != Kind::kForward || fits(promised + most_of_stage(pass.stage, costs_), costs_);
    if (!has_room || progress.ready(pass) > time) return weights_.take();
    ++next_;
    weights_.ran(pass);
    return pass;
  }

 private:
  const std::vector<StagePass>& passes_;
  const PassCosts& costs_;
  size_t next_ = 0;
  PutOff weights_;
};

/// Runs what is ready: backward before forward before weights.
class GreedyRank {
 public:
  GreedyRank(const Schedule& schedule, const PassCosts& costs, int64_t rank)
      : schedule_(schedule), costs_(costs) {
    for (int64_t stage = 0; stage < schedule.stages; ++stage) {
      std::optional<Waiting> waiting;
      for (int64_t micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
        if (schedule.rank_of(stage, micro_batch) != rank) continue;
        if (!waiting) waiting = {stage, micro_batch, micro_batch};
        waiting->end = micro_batch + 1;
      }
      if (waiting) forward_.push_back(*waiting);
    }
    input_ = forward_;
  }

  bool done() const { return all_ran(forward_) && all_ran(input_) && weights_.empty(); }
  std::optional<StagePass> choose(const Progress& progress, double time, double promised) {
    const auto may_always = [](const StagePass&) { return true; };
    const auto input = take_deepest(input_, Kind::kBackwardInput, progress, time, may_always);
    if (input) weights_.ran(*input);
    if (input) return input;
    // Room is left for the later stages of this rank that the micro-batch still has to run.
    const auto has_room = [&](const StagePass& pass) { return fits(promised + still_needed(pass), costs_); };
    const auto forward = take_deepest(forward_, Kind::kForward, progress, time, has_room);
    if (forward) return forward;
    return weights_.take();
  }

 private:
  /// Micro-batches that a stage of this rank has yet to run. They become ready in their order, since every
  /// rank takes them so.
  struct Waiting {
    int64_t stage, next, end;
  };

  static bool all_ran(const std::vector<Waiting>& stages) {
    return std::ranges::all_of(stages, [](const Waiting& stage) { return stage.next == stage.end; });
  }
  /// The first of the latest stage: its backward pass gives memory back first.
  template <typename May>
  static std::optional<StagePass> take_deepest(std::vector<Waiting>& stages, Kind kind,
                                               const Progress& progress, double time, const May& may) {
    for (Waiting& stage : stages | std::views::reverse) {
      if (stage.next == stage.end) continue;
      const StagePass pass{kind, stage.stage, stage.next};
      if (progress.ready(pass) > time || !may(pass)) continue;
      ++stage.next;
      return pass;
    }
    return std::nullopt;
  }
  double still_needed(const StagePass& pass) const {
    double bytes = 0.0;
    for (int64_t stage = pass.stage; stage < schedule_.stages; ++stage) {
      if (schedule_.rank_of(stage, pass.micro_batch) == schedule_.rank_of(pass.stage, pass.micro_batch))
        bytes += most_of_stage(stage, costs_);
    }
    return bytes;
  }

  const Schedule& schedule_;
  const PassCosts& costs_;
  std::vector<Waiting> forward_, input_;
  PutOff weights_;
};

}  // namespace

Schedule fill_weights(const Schedule& without_weights, const PassCosts& costs) {
  return scheduled_in_time<FillingRank>(without_weights, costs);
}

Schedule greedy_schedule(const PipelineShape& shape, Placement placement, const PassCosts& costs) {
  Schedule schedule;
  schedule.name = "greedy";
  schedule.placement = placement;
  schedule.stages = placement == Placement::kLoop ? shape.ranks * shape.chunks
                    : placement == Placement::kV  ? 2 * shape.ranks
                                                  : shape.ranks;
  schedule.micro_batches = shape.micro_batches;
  check_size(schedule.stages, schedule.micro_batches);
  schedule.ranks.resize(static_cast<size_t>(shape.ranks));
  return scheduled_in_time<GreedyRank>(schedule, costs);
}

}  // namespace trireme::plan
