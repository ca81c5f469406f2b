#include "trireme/plan/simulate.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <ranges>
#include <set>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using PassKind = StagePass::Kind;
constexpr double kNever = std::numeric_limits<double>::infinity();

double of_stage(const std::vector<double>& values, int64_t stage) {
  return values.size() == 1 ? values.front() : values.at(static_cast<size_t>(stage));
}

double duration(const StagePass& pass, const PassCosts& costs) {
  const double input = of_stage(costs.backward_input, pass.stage),
               weight = of_stage(costs.backward_weight, pass.stage);
  switch (pass.kind) {
    case PassKind::kForward:
      return of_stage(costs.forward, pass.stage);
    case PassKind::kBackward:
      return input + weight;
    case PassKind::kBackwardInput:
      return input;
    case PassKind::kBackwardWeight:
      return weight;
  }
  return 0.0;
}

double between_halves_of(int64_t stage, const PassCosts& costs) {
  const auto& bytes = costs.between_halves_bytes;
  return of_stage(bytes.empty() ? costs.activation_bytes : bytes, stage);
}

/// The most that a micro-batch ever holds of a stage.
double most_of_stage(int64_t stage, const PassCosts& costs) {
  return std::max(of_stage(costs.activation_bytes, stage), between_halves_of(stage, costs));
}

/// When what passes wait for is there: ends of forward and backward passes by stage and micro-batch.
class Progress {
 public:
  Progress(const Schedule& schedule, const PassCosts& costs)
      : schedule_(schedule),
        costs_(costs),
        forward_(count(schedule), kNever),
        input_(count(schedule), kNever),
        weight_(count(schedule), kNever) {}

  /// When the pass could begin, if its rank were free; kNever: what it needs has not run.
  double ready(const StagePass& pass) const {
    const int64_t stage = pass.stage, micro_batch = pass.micro_batch;
    switch (pass.kind) {
      case PassKind::kForward:
        return stage == 0 ? 0.0 : arrival(forward_, stage - 1, stage, micro_batch);
      case PassKind::kBackward:
      case PassKind::kBackwardInput: {
        const double own = forward_[at(stage, micro_batch)];
        if (stage + 1 == schedule_.stages) return own;
        return std::max(own, arrival(input_, stage + 1, stage, micro_batch));
      }
      case PassKind::kBackwardWeight:
        return input_[at(stage, micro_batch)];
    }
    return kNever;
  }
  bool has_run(const StagePass& pass) const {
    const size_t place = at(pass.stage, pass.micro_batch);
    switch (pass.kind) {
      case PassKind::kForward:
        return forward_[place] < kNever;
      case PassKind::kBackward:
        return input_[place] < kNever || weight_[place] < kNever;
      case PassKind::kBackwardInput:
        return input_[place] < kNever;
      case PassKind::kBackwardWeight:
        return weight_[place] < kNever;
    }
    return false;
  }
  void end(const StagePass& pass, double time) {
    const size_t place = at(pass.stage, pass.micro_batch);
    if (pass.kind == PassKind::kForward) forward_[place] = time;
    if (pass.kind == PassKind::kBackward || pass.kind == PassKind::kBackwardInput) input_[place] = time;
    if (pass.kind == PassKind::kBackward || pass.kind == PassKind::kBackwardWeight) weight_[place] = time;
  }

 private:
  static size_t count(const Schedule& schedule) {
    return static_cast<size_t>(schedule.stages * schedule.micro_batches);
  }
  size_t at(int64_t stage, int64_t micro_batch) const {
    return static_cast<size_t>(stage * schedule_.micro_batches + micro_batch);
  }
  double arrival(const std::vector<double>& ends, int64_t from, int64_t to, int64_t micro_batch) const {
    const bool travels = schedule_.rank_of(from, micro_batch) != schedule_.rank_of(to, micro_batch);
    return ends[at(from, micro_batch)] + (travels ? costs_.transfer : 0.0);
  }

  const Schedule& schedule_;
  const PassCosts& costs_;
  std::vector<double> forward_, input_, weight_;
};

/// One rank on its way through time.
class RankClock {
 public:
  double free_at() const { return free_at_; }
  double held() const { return held_; }
  /// What it holds, with what backward passes for the input will add.
  double promised() const { return promised_; }
  /// Returns when it ends. Two passes that overlap count their time once.
  double run(const StagePass& pass, double begin, double seconds, const PassCosts& costs) {
    const double end = begin + seconds;
    if (timeline_.passes.empty()) timeline_.first = begin;
    if (begin >= free_at_) timeline_.busy += seconds;
    timeline_.passes.push_back({pass, begin, end});
    timeline_.last = free_at_ = end;
    held_ += growth(pass, costs);
    promised_ += growth(pass, costs);
    const double added = most_of_stage(pass.stage, costs) - of_stage(costs.activation_bytes, pass.stage);
    if (pass.kind == PassKind::kForward) promised_ += added;
    if (pass.kind == PassKind::kBackward || pass.kind == PassKind::kBackwardInput) promised_ -= added;
    timeline_.peak_bytes = std::max(timeline_.peak_bytes, held_);
    return end;
  }
  RankTimeline take() { return std::move(timeline_); }

 private:
  RankTimeline timeline_;
  double free_at_ = 0.0, held_ = 0.0, promised_ = 0.0;
};

void check_lengths(const Schedule& schedule, const PassCosts& costs) {
  const auto stages = static_cast<size_t>(schedule.stages);
  for (const auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight,
                             &costs.activation_bytes, &costs.between_halves_bytes}) {
    if (values == &costs.between_halves_bytes && values->empty()) continue;
    if (values->size() != 1 && values->size() != stages) {
      throw ConfigError("[plan.simulate] {} costs for {} stages; give one for all, or one each",
                        values->size(), stages);
    }
  }
}

/// Whether every stage has a rank, and every rank a stage.
void check_placement(const Schedule& schedule) {
  const auto ranks = static_cast<int64_t>(schedule.ranks.size());
  const auto refuse = [&](std::string_view wanted) {
    throw ConfigError(
        "[plan.simulate] stage {} is the last of {} stages on {} ranks, with {} micro-batches; {}",
        schedule.stages - 1, schedule.stages, ranks, schedule.micro_batches, wanted);
  };
  if (schedule.placement == Placement::kLoop && schedule.stages < ranks)
    refuse(fmt::format("rank {} has no stage: give it passes of one, or take fewer ranks", schedule.stages));
  if (schedule.placement == Placement::kV && schedule.stages != 2 * ranks)
    refuse("there and back take two stages a rank");
  if (schedule.placement == Placement::kTwoWays &&
      (schedule.stages != ranks || ranks % 2 != 0 || schedule.micro_batches % 2 != 0))
    refuse("two ways take as many stages as ranks, and even numbers of ranks and micro-batches");
}

/// Every pass once, on its rank.
void check_complete(const Schedule& schedule) {
  struct Seen {
    int forward = 0, input = 0, weight = 0;
  };
  std::vector<Seen> seen(static_cast<size_t>(schedule.stages * schedule.micro_batches));
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const StagePass& pass : schedule.ranks[rank]) {
      if (pass.stage < 0 || pass.stage >= schedule.stages || pass.micro_batch < 0 ||
          pass.micro_batch >= schedule.micro_batches) {
        throw ConfigError("[plan.simulate] rank {}: {} is outside of {} stages and {} micro-batches", rank,
                          to_text(pass), schedule.stages, schedule.micro_batches);
      }
      if (schedule.rank_of(pass.stage, pass.micro_batch) != static_cast<int64_t>(rank)) {
        throw ConfigError("[plan.simulate] rank {} runs {}, but stage {} is on rank {}", rank, to_text(pass),
                          pass.stage, schedule.rank_of(pass.stage, pass.micro_batch));
      }
      Seen& count = seen[static_cast<size_t>(pass.stage * schedule.micro_batches + pass.micro_batch)];
      const bool input = pass.kind == PassKind::kBackward || pass.kind == PassKind::kBackwardInput,
                 weight = pass.kind == PassKind::kBackward || pass.kind == PassKind::kBackwardWeight;
      count.forward += pass.kind == PassKind::kForward;
      count.input += input;
      count.weight += weight;
      if (count.forward > 1 || count.input > 1 || count.weight > 1)
        throw ConfigError("[plan.simulate] rank {} runs {} twice", rank, to_text(pass));
    }
  }
  for (int64_t stage = 0; stage < schedule.stages; ++stage) {
    for (int64_t micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
      const Seen& count = seen[static_cast<size_t>(stage * schedule.micro_batches + micro_batch)];
      const auto missing = count.forward == 0  ? std::optional(PassKind::kForward)
                           : count.input == 0  ? std::optional(PassKind::kBackwardInput)
                           : count.weight == 0 ? std::optional(PassKind::kBackwardWeight)
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
  throw ConfigError("[plan.simulate] {} waits for ever: {}", schedule.name, waiting);
}

/// Runs the pass number `next` of a rank, and the one that overlaps it, if what they need has run; returns
/// how many ran.
size_t advance(const std::vector<StagePass>& passes, size_t next, Progress& progress, RankClock& clock,
               const PassCosts& costs) {
  if (next == passes.size()) return 0;
  const StagePass& pass = passes[next];
  const bool pair = pass.with_next && costs.overlapped_share > 0.0 && next + 1 < passes.size();
  const double ready = std::max(progress.ready(pass), pair ? progress.ready(passes[next + 1]) : 0.0);
  if (ready == kNever) return 0;
  const double begin = std::max(ready, clock.free_at());
  if (!pair) {
    progress.end(pass, clock.run(pass, begin, duration(pass, costs), costs));
    return 1;
  }
  const double seconds = costs.overlapped_share * (duration(pass, costs) + duration(passes[next + 1], costs));
  for (const StagePass& half : {pass, passes[next + 1]})
    progress.end(half, clock.run(half, begin, seconds, costs));
  return 2;
}

bool fits(double bytes, const PassCosts& costs) {
  return costs.memory_limit <= 0.0 || bytes <= costs.memory_limit * (1.0 + 1e-9);
}

void check_memory(const RankClock& clock, size_t rank, const StagePass& pass, const PassCosts& costs) {
  if (fits(clock.held(), costs)) return;
  throw ConfigError(
      "[plan.simulate] rank {} holds {:g} of activations after {}, more than the limit of {:g}; raise that",
      rank, clock.held(), to_text(pass), costs.memory_limit);
}

}  // namespace

double growth(const StagePass& pass, const PassCosts& costs) {
  const double activations = of_stage(costs.activation_bytes, pass.stage),
               between_halves = between_halves_of(pass.stage, costs);
  switch (pass.kind) {
    case PassKind::kForward:
      return activations;
    case PassKind::kBackward:
      return -activations;
    case PassKind::kBackwardInput:
      return between_halves - activations;
    case PassKind::kBackwardWeight:
      return -between_halves;
  }
  return 0.0;
}

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
  Progress progress(schedule, costs);
  std::vector<RankClock> clocks(schedule.ranks.size());
  std::vector<size_t> next(schedule.ranks.size(), 0);
  // In any order of ranks: a pass begins when its own rank and its inputs allow.
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      while (const size_t count = advance(schedule.ranks[rank], next[rank], progress, clocks[rank], costs)) {
        check_memory(clocks[rank], rank, schedule.ranks[rank][next[rank]], costs);
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

namespace {

/// The weights that a rank has put off, in the order of their inputs.
class PutOff {
 public:
  void ran(const StagePass& pass) {
    if (pass.kind == PassKind::kBackwardInput)
      weights_.push_back({PassKind::kBackwardWeight, pass.stage, pass.micro_batch});
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

/// Runs its passes in their order, and weights while the next one cannot run.
class FillingRank {
 public:
  FillingRank(const Schedule& schedule, const PassCosts& costs, int64_t rank)
      : passes_(schedule.ranks[static_cast<size_t>(rank)]), costs_(costs) {}

  bool done() const { return next_ == passes_.size() && weights_.empty(); }
  std::optional<StagePass> choose(const Progress& progress, double time, double promised) {
    if (next_ == passes_.size()) return weights_.take();
    const StagePass& pass = passes_[next_];
    const bool has_room =
        pass.kind != PassKind::kForward || fits(promised + most_of_stage(pass.stage, costs_), costs_);
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
    const auto input = take_deepest(input_, PassKind::kBackwardInput, progress, time, may_always);
    if (input) weights_.ran(*input);
    if (input) return input;
    // Room is left for the later stages of this rank that the micro-batch still has to run.
    const auto has_room = [&](const StagePass& pass) { return fits(promised + still_needed(pass), costs_); };
    const auto forward = take_deepest(forward_, PassKind::kForward, progress, time, has_room);
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
  static std::optional<StagePass> take_deepest(std::vector<Waiting>& stages, PassKind kind,
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

/// The passes that ranks of a kind choose as time goes on.
template <typename Rank>
Schedule scheduled_in_time(const Schedule& given, const PassCosts& costs) {
  check_lengths(given, costs);
  Schedule schedule = given;
  for (auto& passes : schedule.ranks) passes.clear();
  Progress progress(schedule, costs);
  std::vector<RankClock> clocks(given.ranks.size());
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < given.ranks.size(); ++rank)
    ranks.emplace_back(given, costs, static_cast<int64_t>(rank));
  std::set<double> times = {0.0};  // at which something may begin
  while (!times.empty()) {
    const double time = *times.begin();
    times.erase(times.begin());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (clocks[rank].free_at() > time) continue;
      const auto pass = ranks[rank].choose(progress, time, clocks[rank].promised());
      if (!pass) continue;
      const double end = clocks[rank].run(*pass, time, duration(*pass, costs), costs);
      progress.end(*pass, end);
      schedule.ranks[rank].push_back(*pass);
      times.insert({end, end + costs.transfer});
    }
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].done()) continue;
    throw ConfigError(
        "[plan.schedule] rank {} cannot go on within {:g} of activations; raise the limit, or take "
        "more ranks or smaller micro-batches",
        rank, costs.memory_limit);
  }
  return schedule;
}

}  // namespace

Schedule on_one_rank(const Schedule& schedule) {
  std::vector<TimedPass> all;
  for (const RankTimeline& rank : simulate(schedule).ranks)
    all.insert(all.end(), rank.passes.begin(), rank.passes.end());
  // What a pass needs has ended before it.
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
  schedule.ranks.resize(static_cast<size_t>(shape.ranks));
  check_size(schedule.stages, schedule.micro_batches);
  return scheduled_in_time<GreedyRank>(schedule, costs);
}

}  // namespace trireme::plan
