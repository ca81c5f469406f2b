#include "trireme/plan/simulate.h"

#include <algorithm>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/plan/pass_times.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// Whether every stage has a rank, and every rank a stage.
void check_placement(const Schedule& schedule) {
  const auto ranks = static_cast<int64_t>(schedule.ranks.size());
  const auto refuse = [&](std::string_view wanted) {
    throw ConfigError(
        "[plan.simulate] stage {} is the last of {} stages on {} ranks, with {} micro-batches; {}",
        schedule.stages - 1, schedule.stages, ranks, schedule.micro_batches, wanted);
  };
  if (schedule.placement == Placement::kLoop && schedule.stages < ranks)
    refuse(fmt::format("rank {} has no stage: give it passes of one, or use fewer ranks", schedule.stages));
  if (schedule.placement == Placement::kV && schedule.stages != 2 * ranks)
    refuse("a placement in a V needs two stages per rank");
  if (schedule.placement == Placement::kTwoWays &&
      (schedule.stages != ranks || ranks % 2 != 0 || schedule.micro_batches % 2 != 0))
    refuse(
        "a placement in two directions needs as many stages as ranks, and even numbers of ranks and "
        "micro-batches");
  if (schedule.placement == Placement::kTwoWays && schedule.spread_head)
    refuse("a head that is spread over the ranks needs stages in one direction");
}

/// Passes that overlap are a forward and a backward pass, as in DualPipe.
void check_pairs(const Schedule& schedule) {
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const std::vector<StagePass>& passes = schedule.ranks[rank];
    for (size_t i = 0; i < passes.size(); ++i) {
      if (!passes[i].with_next) continue;
      if (i + 1 == passes.size()) {
        throw ConfigError("[plan.simulate] rank {}: nothing follows {} that it could overlap; remove the '+'",
                          rank, to_text(passes[i]));
      }
      const StagePass& next = passes[i + 1];
      const bool forward_then_backward = passes[i].kind == Kind::kForward &&
                                         (next.kind == Kind::kBackward || next.kind == Kind::kBackwardInput);
      if (forward_then_backward && !next.with_next) continue;
      throw ConfigError(
          "[plan.simulate] rank {} overlaps {}+{}; only a forward pass and the backward pass after it "
          "overlap, "
          "such as 0F3+0B1",
          rank, to_text(passes[i]), to_text(next));
    }
  }
}

/// Every pass once, on its rank.
void check_complete(const Schedule& schedule) {
  struct Seen {
    int forward = 0, input = 0, weight = 0;
  };
  std::vector<Seen> seen(static_cast<size_t>(schedule.all_stages() * schedule.micro_batches));
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const StagePass& pass : schedule.ranks[rank]) {
      if (pass.stage < 0 || pass.stage >= schedule.all_stages() || pass.micro_batch < 0 ||
          pass.micro_batch >= schedule.micro_batches) {
        throw ConfigError("[plan.simulate] rank {}: {} is outside {} stages and {} micro-batches", rank,
                          to_text(pass), schedule.all_stages(), schedule.micro_batches);
      }
      const bool half = pass.kind == Kind::kBackwardInput || pass.kind == Kind::kBackwardWeight;
      if (schedule.is_head_part(pass.stage) && half) {
        throw ConfigError(
            "[plan.simulate] rank {} runs {}, but stage {} is a part of the head, whose backward pass is not "
            "split; write {}",
            rank, to_text(pass), pass.stage, to_text({Kind::kBackward, pass.stage, pass.micro_batch}));
      }
      if (schedule.rank_of(pass.stage, pass.micro_batch) != static_cast<int64_t>(rank)) {
        throw ConfigError("[plan.simulate] rank {} runs {}, but stage {} is on rank {}", rank, to_text(pass),
                          pass.stage, schedule.rank_of(pass.stage, pass.micro_batch));
      }
      Seen& count = seen[static_cast<size_t>(pass.stage * schedule.micro_batches + pass.micro_batch)];
      const bool input = pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardInput,
                 weight = pass.kind == Kind::kBackward || pass.kind == Kind::kBackwardWeight;
      count.forward += pass.kind == Kind::kForward;
      count.input += input;
      count.weight += weight;
      if (count.forward > 1 || count.input > 1 || count.weight > 1)
        throw ConfigError("[plan.simulate] rank {} runs {} twice", rank, to_text(pass));
    }
  }
  for (int64_t stage = 0; stage < schedule.all_stages(); ++stage) {
    for (int64_t micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
      const Seen& count = seen[static_cast<size_t>(stage * schedule.micro_batches + micro_batch)];
      const auto missing = count.forward == 0  ? std::optional(Kind::kForward)
                           : count.input == 0  ? std::optional(Kind::kBackwardInput)
                           : count.weight == 0 ? std::optional(Kind::kBackwardWeight)
                                               : std::nullopt;
      if (missing) {
        throw ConfigError("[plan.simulate] rank {} never runs {}", schedule.rank_of(stage, micro_batch),
                          to_text({*missing, stage, micro_batch}));
      }
    }
  }
}

Simulation collect(std::vector<RankClock>& clocks) {
  Simulation simulation;
  for (RankClock& clock : clocks) {
    simulation.ranks.push_back(clock.take());
    simulation.makespan = std::max(simulation.makespan, simulation.ranks.back().last);
  }
  return simulation;
}

/// The pass that a rank waits for, as text: what it needs has not run, and never will.
[[noreturn]] void refuse_deadlock(const Schedule& schedule, const std::vector<size_t>& next) {
  std::string waiting;
  for (size_t rank = 0; rank < next.size(); ++rank) {
    if (next[rank] == schedule.ranks[rank].size()) continue;
    waiting += fmt::format("{}rank {} at {}", waiting.empty() ? "" : ", ", rank,
                           to_text(schedule.ranks[rank][next[rank]]));
  }
  throw ConfigError("[plan.simulate] {} deadlocks: {}", schedule.name, waiting);
}

void check_memory(const RankClock& clock, size_t rank, const StagePass& pass, const PassCosts& costs) {
  if (fits(clock.held(), costs)) return;
  throw ConfigError(
      "[plan.simulate] rank {} holds {:g} of activations after {}, but the limit is {:g}; raise it", rank,
      clock.held(), to_text(pass), costs.memory_limit);
}

/// Runs the pass number `next` of a rank, and the one that overlaps it, if what they need has run; returns
/// how many ran. Throws ConfigError where one of them exceeds the limit of memory.
size_t advance(const Schedule& schedule, size_t rank, size_t next, Progress& progress, RankClock& clock,
               const PassCosts& costs) {
  const std::vector<StagePass>& passes = schedule.ranks[rank];
  if (next == passes.size()) return 0;
  const StagePass& pass = passes[next];
  const bool pair = pass.with_next && costs.overlapped_share > 0.0 && next + 1 < passes.size();
  const double ready = std::max(progress.ready(pass), pair ? progress.ready(passes[next + 1]) : 0.0);
  if (ready == kNever) return 0;
  const double begin = std::max(ready, clock.free_at());
  const auto run = [&](const StagePass& one, double seconds) {
    progress.end(one, clock.run(one, begin, seconds, costs));
    check_memory(clock, rank, one, costs);
  };
  if (!pair) {
    run(pass, duration(pass, costs));
    return 1;
  }
  const double seconds = costs.overlapped_share * (duration(pass, costs) + duration(passes[next + 1], costs));
  for (const StagePass& half : {pass, passes[next + 1]}) run(half, seconds);
  return 2;
}

}  // namespace

double Simulation::bubble() const {
  double busiest = 0.0;
  for (const RankTimeline& rank : ranks) busiest = std::max(busiest, rank.busy);
  return makespan - busiest;
}

double Simulation::efficiency() const {
  double busy = 0.0;
  for (const RankTimeline& rank : ranks) busy += rank.busy;
  return makespan > 0.0 ? busy / (makespan * static_cast<double>(ranks.size())) : 1.0;
}

Simulation simulate(const Schedule& schedule, const PassCosts& costs) {
  check_lengths(schedule, costs);
  check_placement(schedule);
  check_complete(schedule);
  check_pairs(schedule);
  Progress progress(schedule, costs);
  std::vector<RankClock> clocks(schedule.ranks.size());
  std::vector<size_t> next(schedule.ranks.size(), 0);
  // In any order of ranks: a pass begins when its own rank and its inputs allow.
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      while (const size_t count = advance(schedule, rank, next[rank], progress, clocks[rank], costs)) {
        next[rank] += count;
        moved = true;
      }
    }
  }
  for (size_t rank = 0; rank < next.size(); ++rank) {
    if (next[rank] < schedule.ranks[rank].size()) refuse_deadlock(schedule, next);
  }
  return collect(clocks);
}

Schedule on_one_rank(const Schedule& schedule) {
  std::vector<TimedPass> all;
  for (const RankTimeline& rank : simulate(schedule).ranks)
    all.insert(all.end(), rank.passes.begin(), rank.passes.end());
  // Passes are sorted by their ends: a pass ends after those that it needs.
  std::ranges::stable_sort(all, {}, &TimedPass::end);
  Schedule one{.name = schedule.name,
               .placement = Placement::kLoop,
               .stages = schedule.stages,
               .micro_batches = schedule.micro_batches,
               .ranks = std::vector<std::vector<StagePass>>(1)};
  for (const TimedPass& timed : all) {
    one.ranks[0].push_back(timed.pass);
    one.ranks[0].back().with_next = false;
  }
  return one;
}
}  // namespace trireme::plan
