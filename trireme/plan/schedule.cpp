#include "trireme/plan/schedule.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// One rank's list under construction: counts the micro-batches of each kind of pass and stage.
class RankOrder {
 public:
  explicit RankOrder(int64_t micro_batches) : micro_batches_(micro_batches) {}

  /// The next micro-batch of the stage; nothing beyond the last.
  void add(Kind kind, int64_t stage) {
    if (const auto micro_batch = take(kind, stage); micro_batch < micro_batches_)
      passes_.push_back({kind, stage, micro_batch});
  }
  void repeat(int64_t times, const std::vector<std::pair<Kind, int64_t>>& passes) {
    for (int64_t i = 0; i < times; ++i) {
      for (const auto& [kind, stage] : passes) add(kind, stage);
    }
  }
  int64_t count(Kind kind, int64_t stage) const {
    const auto found = std::ranges::find_if(
        counts_, [&](const Count& count) { return count.kind == kind && count.stage == stage; });
    return found == counts_.end() ? 0 : found->next;
  }
  std::vector<StagePass> take_passes() { return std::move(passes_); }

 private:
  struct Count {
    Kind kind;
    int64_t stage, next;
  };
  int64_t take(Kind kind, int64_t stage) {
    for (Count& count : counts_) {
      if (count.kind == kind && count.stage == stage) return count.next++;
    }
    counts_.push_back({kind, stage, 1});
    return 0;
  }

  int64_t micro_batches_;
  std::vector<StagePass> passes_;
  std::vector<Count> counts_;
};

Schedule empty_schedule(const PipelineShape& shape, Placement placement, int64_t stages) {
  Schedule schedule;
  schedule.placement = placement;
  schedule.stages = stages;
  schedule.micro_batches = shape.micro_batches;
  schedule.ranks.resize(static_cast<size_t>(shape.ranks));
  return schedule;
}

/// `order_of(rank)` for every rank.
template <typename OrderOf>
Schedule by_rank(const PipelineShape& shape, Placement placement, int64_t stages, const OrderOf& order_of) {
  Schedule schedule = empty_schedule(shape, placement, stages);
  for (int64_t rank = 0; rank < shape.ranks; ++rank)
    schedule.ranks[static_cast<size_t>(rank)] = order_of(rank);
  return schedule;
}

/// Huang et al. 2019: all forward passes, then all backward passes.
Schedule gpipe(const PipelineShape& shape) {
  return by_rank(shape, Placement::kLoop, shape.ranks, [&](int64_t rank) {
    RankOrder order(shape.micro_batches);
    order.repeat(shape.micro_batches, {{Kind::kForward, rank}});
    order.repeat(shape.micro_batches, {{Kind::kBackward, rank}});
    return order.take_passes();
  });
}

/// Narayanan et al. 2021 (PipeDream-Flush): as many forward passes as there are ranks from here on, then one
/// of each in turn.
Schedule one_forward_one_backward(const PipelineShape& shape) {
  return by_rank(shape, Placement::kLoop, shape.ranks, [&](int64_t rank) {
    RankOrder order(shape.micro_batches);
    order.repeat(shape.ranks - rank, {{Kind::kForward, rank}});
    order.repeat(shape.micro_batches, {{Kind::kBackward, rank}, {Kind::kForward, rank}});
    return order.take_passes();
  });
}

/// Lamy-Poirier 2023: a rank runs all micro-batches through a stage before its next one.
Schedule looped_bfs(const PipelineShape& shape) {
  const int64_t stages = shape.ranks * shape.chunks;
  return by_rank(shape, Placement::kLoop, stages, [&](int64_t rank) {
    std::vector<StagePass> passes;
    for (int64_t stage = rank; stage < stages; stage += shape.ranks) {
      for (int64_t i = 0; i < shape.micro_batches; ++i) passes.push_back({Kind::kForward, stage, i});
    }
    for (int64_t stage = stages - shape.ranks + rank; stage >= 0; stage -= shape.ranks) {
      for (int64_t i = shape.micro_batches; i-- > 0;) passes.push_back({Kind::kBackward, stage, i});
    }
    return passes;
  });
}

/// Narayanan et al. 2021, with backward for the input and for the weights apart (Qi et al. 2024, ZB-H1) where
/// `zero_bubble`. Micro-batches go through the chunks of a rank in rounds.
Schedule interleaved(const PipelineShape& shape, bool zero_bubble) {
  const int64_t ranks = shape.ranks, chunks = shape.chunks, stages = ranks * chunks;
  const int64_t rounds = std::max<int64_t>(1, shape.micro_batches / ranks);
  if (shape.micro_batches % rounds != 0) {
    throw ConfigError(
        "[plan.schedule] {} micro-batches do not divide into {} equal rounds for {} ranks; use a multiple of "
        "{}",
        shape.micro_batches, rounds, ranks, ranks);
  }
  const int64_t per_round = shape.micro_batches / rounds, all = shape.micro_batches * chunks;
  return by_rank(shape, Placement::kLoop, stages, [&](int64_t rank) {
    RankOrder order(shape.micro_batches);
    const auto forward_stage = [&](int64_t i) { return i / per_round % chunks * ranks + rank; };
    const auto backward_stage = [&](int64_t i) {
      return (chunks - 1 - i / per_round % chunks) * ranks + rank;
    };
    const int64_t ahead = (zero_bubble ? 1 : 2) * (ranks - 1 - rank);
    const int64_t warm_up = std::min(all, (chunks - 1) * per_round + ahead);
    for (int64_t i = 0; i < warm_up; ++i) order.add(Kind::kForward, forward_stage(i));
    int64_t weights = 0;
    for (int64_t i = 0; i < all; ++i) {
      if (warm_up + i < all) order.add(Kind::kForward, forward_stage(warm_up + i));
      order.add(zero_bubble ? Kind::kBackwardInput : Kind::kBackward, backward_stage(i));
      if (zero_bubble && i >= rank) order.add(Kind::kBackwardWeight, backward_stage(weights++));
    }
    while (zero_bubble && weights < all) order.add(Kind::kBackwardWeight, backward_stage(weights++));
    return order.take_passes();
  });
}

/// Qi et al. 2024, ZB-H2: twice the memory of 1F1B fills the bubble with forward passes, and weights come
/// last.
Schedule zb_h2(const PipelineShape& shape) {
  PassCosts unit;
  unit.memory_limit = static_cast<double>(2 * shape.ranks);
  return greedy_schedule({shape.ranks, shape.micro_batches, 1}, Placement::kLoop, unit);
}

/// Qi et al. 2024: two stages a rank, there and back, so that the last stage is on the first rank.
Schedule zb_v(const PipelineShape& shape) {
  const int64_t ranks = shape.ranks;
  return by_rank(shape, Placement::kV, 2 * ranks, [&](int64_t rank) {
    const int64_t there = rank, back = 2 * ranks - 1 - rank;
    RankOrder order(shape.micro_batches);
    order.repeat(2 * (ranks - rank) - 1, {{Kind::kForward, there}});
    order.repeat(rank, {{Kind::kForward, back}, {Kind::kForward, there}});
    order.repeat(ranks - rank,
                 {{Kind::kForward, back}, {Kind::kBackwardInput, back}, {Kind::kBackwardWeight, back}});
    const int64_t padded = std::max(shape.micro_batches, 2 * ranks - 1);
    while (order.count(Kind::kForward, back) < padded) {
      if (order.count(Kind::kForward, there) < padded) order.add(Kind::kForward, there);
      order.repeat(1, {{Kind::kBackwardInput, there},
                       {Kind::kBackwardWeight, there},
                       {Kind::kForward, back},
                       {Kind::kBackwardInput, back},
                       {Kind::kBackwardWeight, back}});
    }
    order.repeat(rank, {{Kind::kBackwardInput, there}, {Kind::kBackwardInput, back}});
    order.repeat(ranks - rank, {{Kind::kBackwardInput, there}, {Kind::kBackwardWeight, there}});
    while (order.count(Kind::kBackwardWeight, back) < padded) order.add(Kind::kBackwardWeight, back);
    while (order.count(Kind::kBackwardWeight, there) < padded) order.add(Kind::kBackwardWeight, there);
    return order.take_passes();
  });
}

/// Qi et al. 2024 (Pipeline parallelism with controllable memory): forward there and back, backward back and
/// there are repeated every 6 units at the offsets of a rank. Weights fill what is left while no more than
/// `limit` micro-batches are in flight.
template <typename OffsetsOf>
Schedule stable_pattern(const PipelineShape& shape, int64_t limit, const OffsetsOf& offsets_of) {
  constexpr int64_t kPeriod = 6;
  const int64_t ranks = shape.ranks;
  const Schedule without_weights = by_rank(shape, Placement::kV, 2 * ranks, [&](int64_t rank) {
    const int64_t there = rank, back = 2 * ranks - 1 - rank;
    const std::array<int64_t, 4> offsets = offsets_of(rank);
    const std::array<std::pair<Kind, int64_t>, 4> kinds = {{{Kind::kForward, there},
                                                            {Kind::kForward, back},
                                                            {Kind::kBackwardInput, back},
                                                            {Kind::kBackwardInput, there}}};
    std::vector<std::pair<int64_t, StagePass>> line;
    for (size_t i = 0; i < kinds.size(); ++i) {
      for (int64_t micro_batch = 0; micro_batch < shape.micro_batches; ++micro_batch) {
        line.push_back({offsets[i] + kPeriod * micro_batch, {kinds[i].first, kinds[i].second, micro_batch}});
      }
    }
    std::ranges::sort(line, {}, &std::pair<int64_t, StagePass>::first);
    std::vector<StagePass> passes;
    for (const auto& [unit, pass] : line) passes.push_back(pass);
    return passes;
  });
  PassCosts unit;
  unit.memory_limit = static_cast<double>(2 * limit);  // two stages a rank
  return fill_weights(without_weights, unit);
}

Schedule v_half(const PipelineShape& shape) {
  const int64_t p = shape.ranks, delta = p % 2 == 0 ? 3 : 0;
  return stable_pattern(shape, p / 2 + 1, [=](int64_t i) {
    return std::array<int64_t, 4>{2 * i, 3 * p - i - 2, 3 * p + delta + 2 * i - 1, 6 * p + delta - i - 2};
  });
}

Schedule v_min(const PipelineShape& shape) {
  const int64_t p = shape.ranks, delta = p % 3 == 0 ? 2 : 0;
  return stable_pattern(shape, (p + 4) / 3, [=](int64_t i) {
    return std::array<int64_t, 4>{i, 2 * p - i - 1, 2 * p + delta + i, 4 * p + delta - i - 1};
  });
}

/// A rank's list from what its eight phases do: weights that are put off come in the order in which their
/// inputs did.
class DualOrder {
 public:
  DualOrder(int64_t near_stage, int64_t far_stage, int64_t near_first, int64_t far_first)
      : next_{{{near_stage, near_first, near_first}, {far_stage, far_first, far_first}}} {}

  enum Side : size_t { kNear, kFar };
  void forward(Side side, bool with_next = false) {
    passes_.push_back({Kind::kForward, next_[side].stage, next_[side].forward++, with_next});
  }
  void backward(Side side, bool split = false) {
    const StagePass pass{split ? Kind::kBackwardInput : Kind::kBackward, next_[side].stage,
                         next_[side].backward++};
    passes_.push_back(pass);
    if (split) weights_.push_back({Kind::kBackwardWeight, pass.stage, pass.micro_batch});
  }
  void forward_backward(Side forward_side, Side backward_side) {
    forward(forward_side, /*with_next=*/true);
    backward(backward_side);
  }
  void weight() {
    passes_.push_back(weights_.front());
    weights_.erase(weights_.begin());
  }
  bool has_weights() const { return !weights_.empty(); }
  std::vector<StagePass> take_passes() { return std::move(passes_); }

 private:
  struct Next {
    int64_t stage, forward, backward;
  };
  std::array<Next, 2> next_;
  std::vector<StagePass> passes_, weights_;
};

/// DeepSeek's eight phases on the rank that is `near` from the start of its direction, of `half` ranks;
/// `steady` overlapped pairs a direction.
std::vector<StagePass> dual_phases(DualOrder order, int64_t half, int64_t near, int64_t steady,
                                   bool first_pair_apart) {
  using enum DualOrder::Side;
  const int64_t rest = half - near - 1;
  for (int64_t i = 0; i < 2 * rest; ++i) order.forward(kNear);
  for (int64_t i = 0; i <= near; ++i) {
    order.forward(kNear);
    order.forward(kFar);
  }
  for (int64_t i = 0; i < rest; ++i) {
    order.backward(kFar, /*split=*/true);
    order.weight();
    order.forward(kFar);
  }
  for (int64_t i = 0; i < steady; ++i) {
    if (i == 0 && first_pair_apart) {
      order.forward(kNear);
      order.backward(kFar);
    } else {
      order.forward_backward(kNear, kFar);
    }
    order.forward_backward(kFar, kNear);
  }
  for (int64_t i = 0; i < rest; ++i) {
    order.backward(kFar);
    order.forward_backward(kFar, kNear);
  }
  bool split = false;
  for (int64_t i = 0; i <= near; ++i) {
    if (i == (near + 1) / 2 && near % 2 == 1) split = true;
    order.backward(kFar, split);
    if (i == (near + 1) / 2 && near % 2 == 0) split = true;
    order.backward(kNear, split);
  }
  for (int64_t i = 0; i < rest; ++i) {
    order.weight();
    order.backward(kNear, /*split=*/true);
  }
  while (order.has_weights()) order.weight();
  return order.take_passes();
}

void check(bool right, ScheduleName name, const PipelineShape& shape, std::string_view wanted) {
  if (right) return;
  throw ConfigError("[plan.schedule] {} needs {}, but there are {} micro-batches on {} ranks",
                    plan::name(name), wanted, shape.micro_batches, shape.ranks);
}

/// DeepSeek-V3, 2024: the model twice, in opposite directions; forward passes of one overlap backward passes
/// of the other.
Schedule dualpipe(const PipelineShape& shape) {
  const int64_t ranks = shape.ranks, micro_batches = shape.micro_batches;
  check(ranks % 2 == 0 && micro_batches % 2 == 0 && micro_batches >= 2 * ranks, ScheduleName::kDualPipe,
        shape,
        fmt::format("an even number of ranks and an even number of micro-batches, at least {}", 2 * ranks));
  return by_rank(shape, Placement::kTwoWays, ranks, [&](int64_t rank) {
    const int64_t half = ranks / 2, near = std::min(rank, ranks - 1 - rank);
    // The direction that starts nearer to this rank goes first.
    const bool second_half = rank >= half;
    const int64_t near_stage = second_half ? ranks - 1 - rank : rank, far_stage = ranks - 1 - near_stage;
    const int64_t near_first = second_half ? micro_batches / 2 : 0;
    const bool is_middle = rank == half - 1 || rank == half;
    return dual_phases({near_stage, far_stage, near_first, micro_batches / 2 - near_first}, half, near,
                       micro_batches / 2 - ranks + near + 1, is_middle);
  });
}

/// DeepSeek and Sea AI Lab, 2025: DualPipe cut in half, with one copy of the model, there and back.
Schedule dualpipe_v(const PipelineShape& shape) {
  const int64_t ranks = shape.ranks;
  check(shape.micro_batches >= 2 * ranks, ScheduleName::kDualPipeV, shape,
        fmt::format("at least {} micro-batches", 2 * ranks));
  return by_rank(shape, Placement::kV, 2 * ranks, [&](int64_t rank) {
    return dual_phases({rank, 2 * ranks - 1 - rank, 0, 0}, ranks, rank,
                       shape.micro_batches - 2 * ranks + rank + 1, rank == ranks - 1);
  });
}

Schedule generate(ScheduleName name, const PipelineShape& shape) {
  switch (name) {
    case ScheduleName::kGpipe:
      return gpipe(shape);
    case ScheduleName::k1F1B:
      return one_forward_one_backward(shape);
    case ScheduleName::kInterleaved1F1B:
      return interleaved(shape, /*zero_bubble=*/false);
    case ScheduleName::kLoopedBfs:
      return looped_bfs(shape);
    case ScheduleName::kZbH1:
      return interleaved({shape.ranks, shape.micro_batches, 1}, /*zero_bubble=*/true);
    case ScheduleName::kZbH2:
      return zb_h2(shape);
    case ScheduleName::kInterleavedZb:
      return interleaved(shape, /*zero_bubble=*/true);
    case ScheduleName::kZbV:
      return zb_v(shape);
    case ScheduleName::kVHalf:
      return v_half(shape);
    case ScheduleName::kVMin:
      return v_min(shape);
    case ScheduleName::kDualPipe:
      return dualpipe(shape);
    case ScheduleName::kDualPipeV:
      return dualpipe_v(shape);
  }
  throw LogicError("[plan.schedule] schedule {} has no generator", static_cast<int>(name));
}

}  // namespace

int64_t Schedule::rank_of(int64_t stage, int64_t micro_batch) const {
  const auto count = static_cast<int64_t>(ranks.size());
  if (is_head_part(stage)) return stage - stages;
  switch (placement) {
    case Placement::kLoop:
      return stage % count;
    case Placement::kV:
      return stage < count ? stage : 2 * count - 1 - stage;
    case Placement::kTwoWays:
      return micro_batch < micro_batches / 2 ? stage : count - 1 - stage;
  }
  return 0;
}

std::vector<int64_t> Schedule::ranks_of_stages() const {
  std::vector<int64_t> of_stages;
  for (int64_t stage = 0; stage < stages; ++stage)
    of_stages.push_back(std::min(rank_of(stage, 0), rank_of(stage, micro_batches - 1)));
  return of_stages;
}

std::vector<int64_t> Schedule::stages_of(int64_t rank) const {
  std::vector<int64_t> here;
  for (int64_t stage = 0; stage < all_stages(); ++stage) {
    if (rank_of(stage, 0) == rank || rank_of(stage, micro_batches - 1) == rank) here.push_back(stage);
  }
  return here;
}

void check_size(int64_t stages, int64_t micro_batches) {
  constexpr int64_t kMost = 1'000'000;
  if (stages <= kMost / micro_batches) return;
  throw ConfigError(
      "[plan.schedule] {} stages x {} micro-batches exceed the limit of {} forward passes; use at most {} "
      "micro-batches",
      stages, micro_batches, kMost, kMost / stages);
}

Schedule make_schedule(ScheduleName name, const PipelineShape& shape) {
  if (shape.ranks < 1 || shape.micro_batches < 1 || shape.chunks < 1) {
    throw ConfigError("[plan.schedule] {} ranks, {} micro-batches and {} chunks: each must be at least 1",
                      shape.ranks, shape.micro_batches, shape.chunks);
  }
  check_size(takes_chunks(name) ? shape.ranks * shape.chunks : shape.ranks, shape.micro_batches);
  Schedule schedule = generate(name, shape);
  schedule.name = plan::name(name);
  return schedule;
}

Schedule forward_only(const Schedule& schedule, int64_t micro_batches) {
  Schedule result{.name = schedule.name + ", forward only",
                  .placement = schedule.placement,
                  .stages = schedule.stages,
                  .micro_batches = micro_batches,
                  .ranks = {},
                  .spread_head = schedule.spread_head};
  const auto ranks = std::ssize(schedule.ranks);
  result.ranks.resize(schedule.ranks.size());
  for (int64_t group = 0; group < micro_batches; group += ranks) {
    // One order of all passes, which every rank follows: none waits for ever.
    for (int64_t stage = 0; stage < result.all_stages(); ++stage) {
      for (int64_t micro_batch = group; micro_batch < std::min(group + ranks, micro_batches); ++micro_batch)
        result.ranks[static_cast<size_t>(result.rank_of(stage, micro_batch))].push_back(
            {Kind::kForward, stage, micro_batch});
    }
  }
  return result;
}

bool takes_chunks(ScheduleName name) {
  return name == ScheduleName::kInterleaved1F1B || name == ScheduleName::kInterleavedZb ||
         name == ScheduleName::kLoopedBfs;
}

std::string_view summary(ScheduleName name) {
  switch (name) {
    case ScheduleName::kGpipe:
      return "all forward passes, then all backward passes";
    case ScheduleName::k1F1B:
      return "alternating forward and backward passes; at most one micro-batch in flight per remaining rank";
    case ScheduleName::kInterleaved1F1B:
      return "1f1b with several stages per rank, which divides the bubble by their number";
    case ScheduleName::kLoopedBfs:
      return "several stages per rank; all micro-batches pass one stage before the next";
    case ScheduleName::kZbH1:
      return "the weight part of backward fills the bubble; memory of 1f1b";
    case ScheduleName::kZbH2:
      return "zb_h1 with more forward passes in the bubble; twice its memory";
    case ScheduleName::kInterleavedZb:
      return "zb_h1 with several stages per rank";
    case ScheduleName::kZbV:
      return "two stages per rank, placed in a V; the memory of 1f1b on every rank";
    case ScheduleName::kVHalf:
      return "zb_v with half of its memory";
    case ScheduleName::kVMin:
      return "zb_v with a third of its memory";
    case ScheduleName::kDualPipe:
      return "two copies of the model in opposite directions; forward and backward passes in pairs";
    case ScheduleName::kDualPipeV:
      return "one copy, placed in a V; forward and backward passes in pairs";
  }
  return {};
}

Schedule make_windowed_schedule(ScheduleName name, const PipelineShape& shape, int64_t window) {
  if (window < 1 || shape.micro_batches % window != 0) {
    throw ConfigError("[plan.schedule] a window of {} does not divide {} micro-batches; use a divisor",
                      window, shape.micro_batches);
  }
  const Schedule one = make_schedule(name, {shape.ranks, window, shape.chunks});
  Schedule all = one;
  all.micro_batches = shape.micro_batches;
  for (auto& passes : all.ranks) passes.clear();
  // If there are two copies of the model, each takes half of all micro-batches.
  const int64_t half = window / 2;
  const auto number = [&](int64_t micro_batch, int64_t windows_before) {
    if (one.placement != Placement::kTwoWays) return windows_before * window + micro_batch;
    const bool second = micro_batch >= half;
    return windows_before * half + micro_batch + (second ? shape.micro_batches / 2 - half : 0);
  };
  for (int64_t before = 0; before < shape.micro_batches / window; ++before) {
    for (size_t rank = 0; rank < one.ranks.size(); ++rank) {
      for (StagePass pass : one.ranks[rank]) {
        pass.micro_batch = number(pass.micro_batch, before);
        all.ranks[rank].push_back(pass);
      }
    }
  }
  return all;
}

}  // namespace trireme::plan
