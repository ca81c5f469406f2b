// Every schedule over many shapes: each pass once, nothing waits for ever; bubbles and memory as published.
#include "trireme/plan/schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/plan/schedules.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {
namespace {

/// A rank's passes take 1, 1 and 1 for each micro-batch, whatever its stages.
PassCosts unit_costs(const Schedule& schedule) {
  const double share = static_cast<double>(schedule.ranks.size()) / static_cast<double>(schedule.stages);
  PassCosts costs;
  costs.forward = costs.backward_input = costs.backward_weight = costs.activation_bytes = {share};
  return costs;
}

std::vector<double> peaks(const Simulation& simulation) {
  std::vector<double> result;
  for (const RankTimeline& rank : simulation.ranks) result.push_back(rank.peak_bytes);
  return result;
}

bool takes(ScheduleName name, const PipelineShape& shape) {
  const int64_t rounds = std::max<int64_t>(1, shape.micro_batches / shape.ranks);
  switch (name) {
    case ScheduleName::kInterleaved1F1B:
    case ScheduleName::kInterleavedZb:
    case ScheduleName::kZbH1:
      return shape.micro_batches % rounds == 0;
    case ScheduleName::kDualPipe:
      return shape.ranks % 2 == 0 && shape.micro_batches % 2 == 0 && shape.micro_batches >= 2 * shape.ranks;
    case ScheduleName::kDualPipeV:
      return shape.micro_batches >= 2 * shape.ranks;
    default:
      return true;
  }
}

TEST(Schedule, InWindowsKeepsFewInFlightAndCostsBubbles) {
  for (const ScheduleName name : {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kDualPipe,
                                  ScheduleName::kDualPipeV, ScheduleName::kZbV}) {
    const PipelineShape shape{2, 16, 1};
    double makespan = 0.0;
    for (const int64_t window : {16, 8, 4}) {
      const Schedule schedule = make_windowed_schedule(name, shape, window);
      const Simulation simulation = simulate(schedule);  // every pass once, and nothing waits in vain
      EXPECT_GE(simulation.makespan, makespan) << plan::name(name) << ", windows of " << window;
      makespan = simulation.makespan;
    }
    EXPECT_EQ(make_windowed_schedule(name, shape, 16).ranks, make_schedule(name, shape).ranks);
  }
  const auto in_flight = [](int64_t window) {
    return simulate(make_windowed_schedule(ScheduleName::kGpipe, {2, 16, 1}, window)).ranks[1].peak_bytes;
  };
  EXPECT_EQ(in_flight(16), 16.0);
  EXPECT_EQ(in_flight(4), 4.0);
  test::expect_refusal(
      [] {
        make_windowed_schedule(ScheduleName::kGpipe, {2, 16, 1}, 5);
      },
      {"a window of 5", "16 micro-batches"});
}

TEST(Schedule, RunsEveryPassOnceAndWaitsForNothingInVain) {
  for (const ScheduleName name : all_values<ScheduleName>()) {
    for (int64_t ranks = 1; ranks <= 16; ++ranks) {
      for (const int64_t micro_batches : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64}) {
        for (int64_t chunks = 1; chunks <= (has_chunks(name) ? 4 : 1); ++chunks) {
          const PipelineShape shape{ranks, micro_batches, chunks};
          const std::string what =
              fmt::format("{}, {} ranks, {} micro-batches, {} chunks", name, ranks, micro_batches, chunks);
          if (!takes(name, shape)) {
            EXPECT_THROW(make_schedule(name, shape), ConfigError) << what;
            continue;
          }
          const Schedule schedule = make_schedule(name, shape);
          const Simulation simulation = simulate(schedule, unit_costs(schedule));
          const auto work = static_cast<double>(3 * micro_batches);
          for (const RankTimeline& rank : simulation.ranks) {
            EXPECT_NEAR(rank.busy, work, kNear) << what;
            EXPECT_LE(rank.peak_bytes, static_cast<double>(micro_batches) + kNear) << what;
          }
          EXPECT_GE(simulation.makespan, work - kNear) << what;
          EXPECT_EQ(from_csv(to_csv(schedule), schedule.placement, schedule.name).ranks, schedule.ranks)
              << what;
        }
      }
    }
  }
}

TEST(Schedule, SaysHowManyMicroBatchesItNeeds) {
  const auto make = [](ScheduleName name, const PipelineShape& shape) {
    return [=] { make_schedule(name, shape); };
  };
  test::expect_refusal(make(ScheduleName::kDualPipe, {4, 6}),
                       {"at least 8", "there are 6 micro-batches on 4 ranks"});
  test::expect_refusal(make(ScheduleName::kDualPipeV, {4, 7}), {"at least 8", "there are 7"});
  test::expect_refusal(make(ScheduleName::kInterleaved1F1B, {4, 9, 2}),
                       {"9 micro-batches", "use a multiple of 4"});
}

/// Formulas for balanced stages, no transfer, and enough micro-batches: the bubble of a step.
struct Published {
  ScheduleName name;
  int64_t chunks;
  double (*bubble)(double p, double f, double i, double w, double v);
};

TEST(Schedule, HasThePublishedBubble) {
  const Published table[] = {
      {ScheduleName::kGpipe, 1,
       [](double p, double f, double i, double w, double) { return (p - 1) * (f + i + w); }},
      {ScheduleName::k1F1B, 1,
       [](double p, double f, double i, double w, double) { return (p - 1) * (f + i + w); }},
      {ScheduleName::kLoopedBfs, 2,
       [](double p, double f, double i, double w, double v) { return (p - 1) * (f + i + w) / v; }},
      {ScheduleName::kInterleaved1F1B, 2,
       [](double p, double f, double i, double w, double v) { return (p - 1) * (f + i + w) / v; }},
      {ScheduleName::kInterleaved1F1B, 4,
       [](double p, double f, double i, double w, double v) { return (p - 1) * (f + i + w) / v; }},
      {ScheduleName::kZbH1, 1,
       [](double p, double f, double i, double w, double) { return (p - 1) * (f + i - w); }},
      {ScheduleName::kInterleavedZb, 2,
       [](double p, double f, double i, double w, double v) { return (p - 1) * (f + i - w) / v; }},
  };
  for (const Published& row : table) {
    for (const int64_t ranks : {2, 4, 8}) {
      for (const auto& [f, i, w] : {std::array{1.0, 1.0, 1.0}, {2.0, 2.5, 1.5}}) {
        const Schedule schedule = make_schedule(row.name, {ranks, 3 * ranks, row.chunks});
        const auto v = static_cast<double>(row.chunks);
        PassCosts costs;
        costs.forward = {f / v};
        costs.backward_input = {i / v};
        costs.backward_weight = {w / v};
        EXPECT_NEAR(simulate(schedule, costs).bubble(), row.bubble(static_cast<double>(ranks), f, i, w, v),
                    kNear)
            << fmt::format("{} on {}, {} chunks, {}", row.name, ranks, row.chunks, f);
      }
    }
  }
}

/// The table of docs/pipelines.md, in passes of a whole rank that take equally long.
TEST(Schedule, KeepsTheTableOfItsPageOnAnyNumberOfRanks) {
  struct Row {
    ScheduleName name;
    std::function<double(double p)> bubble;  ///< empty: the page gives no formula
    std::function<double(double p, double m)> most_in_flight;
    std::function<bool(int64_t p, int64_t m)> holds;  ///< the page's condition
    double overlapped_share = 0.0;
  };
  const auto always = [](int64_t, int64_t) { return true; };
  const auto filled = [](int64_t p, int64_t m) { return m >= p; };
  const auto filled_twice = [](int64_t p, int64_t m) { return m >= 2 * p - 1; };
  const auto evenly_filled = [](int64_t p, int64_t m) { return p % 2 == 0 && m >= p; };
  const Row table[] = {
      {ScheduleName::kGpipe, [](double p) { return 3 * (p - 1); }, [](double, double m) { return m; },
       always},
      {ScheduleName::k1F1B, [](double p) { return 3 * (p - 1); },
       [](double p, double m) { return std::min(p, m); }, always},
      {ScheduleName::kZbH1, [](double p) { return p - 1; }, [](double p, double) { return p; }, filled},
      {ScheduleName::kZbH2, {}, [](double p, double m) { return std::min(2 * p, m); }, filled},
      {ScheduleName::kZbV, [](double p) { return (p - 1) / 2; }, [](double p, double) { return p; },
       filled_twice},
      {ScheduleName::kVHalf, [](double p) { return 1.5 * (p - 1); },
       [](double p, double) { return p / 2 + 1; }, evenly_filled},
      {ScheduleName::kVMin, {}, [](double p, double) { return std::floor((p + 4) / 3); }, filled},
      {ScheduleName::kDualPipe, [](double p) { return p - 2; }, [](double p, double) { return p + 1; },
       always, 1.0},
      {ScheduleName::kDualPipeV, [](double p) { return p - 1; }, [](double p, double) { return p + 0.5; },
       always, 1.0},
  };
  for (const Row& row : table) {
    for (int64_t ranks = 2; ranks <= 16; ++ranks) {
      for (const int64_t micro_batches : {ranks, ranks + 1, 2 * ranks - 2, 2 * ranks, 3 * ranks, 4 * ranks}) {
        const PipelineShape shape{ranks, micro_batches, 1};
        if (!takes(row.name, shape) || !row.holds(ranks, micro_batches)) continue;
        const Schedule schedule = make_schedule(row.name, shape);
        PassCosts costs = unit_costs(schedule);
        costs.overlapped_share = row.overlapped_share;
        const Simulation simulation = simulate(schedule, costs);
        const auto p = static_cast<double>(ranks), m = static_cast<double>(micro_batches);
        const std::string what = fmt::format("{} on {}, {} micro-batches", row.name, ranks, micro_batches);
        if (row.bubble) {
          EXPECT_NEAR(simulation.bubble(), row.bubble(p), kNear) << what;
        }
        EXPECT_NEAR(std::ranges::max(peaks(simulation)), row.most_in_flight(p, m), kNear) << what;
      }
    }
  }
}

TEST(Schedule, WithSeveralStagesARankKeepsTheTableOfItsPage) {
  for (int64_t ranks = 2; ranks <= 16; ++ranks) {
    for (const int64_t rounds : {1, 2, 3}) {
      for (int64_t chunks = 1; chunks <= 4; ++chunks) {
        const PipelineShape shape{ranks, rounds * ranks, chunks};
        const auto p = static_cast<double>(ranks), m = static_cast<double>(rounds * ranks),
                   v = static_cast<double>(chunks);
        const std::string what = fmt::format("{} ranks, {} rounds, {} chunks", ranks, rounds, chunks);
        const auto simulated = [&](ScheduleName name) {
          const Schedule schedule = make_schedule(name, shape);
          return simulate(schedule, unit_costs(schedule));
        };
        const Simulation zero_bubble = simulated(ScheduleName::kInterleavedZb),
                         plain = simulated(ScheduleName::kInterleaved1F1B),
                         breadth_first = simulated(ScheduleName::kLoopedBfs);
        EXPECT_NEAR(zero_bubble.bubble(), (p - 1) / v, kNear) << what;
        EXPECT_NEAR(std::ranges::max(peaks(zero_bubble)), p, kNear) << what;
        EXPECT_NEAR(plain.bubble(), 3 * (p - 1) / v, kNear) << what;
        EXPECT_NEAR(peaks(plain)[0], std::min(m, ((v - 1) * p + 2 * (p - 1) + 1) / v), kNear) << what;
        EXPECT_NEAR(breadth_first.bubble(), 3 * (p - 1) / v, kNear) << what;
        EXPECT_NEAR(std::ranges::max(peaks(breadth_first)), m, kNear) << what;
      }
    }
  }
}

struct Golden {
  ScheduleName name;
  PipelineShape shape;
  double bubble;
  std::vector<double> peaks;  ///< one: of every rank
  double overlapped_share = 0.0;
};

/// In passes of a whole rank; from the papers' tables and from the authors' own generators.
const Golden kGolden[] = {
    {ScheduleName::kGpipe, {4, 8, 1}, 9.0, {8}},
    {ScheduleName::k1F1B, {4, 8, 1}, 9.0, {4, 3, 2, 1}},
    {ScheduleName::kInterleaved1F1B, {4, 8, 1}, 9.0, {7, 5, 3, 1}},
    {ScheduleName::kInterleaved1F1B, {4, 8, 2}, 4.5, {5.5, 4.5, 3.5, 2.5}},
    {ScheduleName::kInterleaved1F1B, {8, 24, 2}, 10.5, {11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5}},
    {ScheduleName::kZbH1, {4, 8, 1}, 3.0, {4}},
    {ScheduleName::kZbH1, {8, 16, 1}, 7.0, {8}},
    {ScheduleName::kZbH2, {4, 8, 1}, 3.0, {8}},
    {ScheduleName::kInterleavedZb, {4, 8, 2}, 1.5, {4}},
    {ScheduleName::kInterleavedZb, {8, 24, 2}, 3.5, {8}},
    {ScheduleName::kZbV, {4, 8, 1}, 1.5, {4}},
    {ScheduleName::kZbV, {8, 16, 1}, 3.5, {8}},
    {ScheduleName::kVHalf, {4, 8, 1}, 4.5, {3}},
    {ScheduleName::kVHalf, {8, 24, 1}, 10.5, {5}},
    {ScheduleName::kVMin, {4, 8, 1}, 5.5, {2}},
    {ScheduleName::kDualPipe, {4, 8, 1}, 2.0, {5}, 1.0},
    {ScheduleName::kDualPipe, {8, 16, 1}, 6.0, {9}, 1.0},
    {ScheduleName::kDualPipeV, {4, 8, 1}, 3.0, {4.5}, 1.0},
    {ScheduleName::kDualPipeV, {8, 24, 1}, 7.0, {8.5}, 1.0},
};

TEST(Schedule, MeetsTheTablesOfThePapers) {
  for (const Golden& row : kGolden) {
    const Schedule schedule = make_schedule(row.name, row.shape);
    PassCosts costs = unit_costs(schedule);
    costs.overlapped_share = row.overlapped_share;
    const Simulation simulation = simulate(schedule, costs);
    const std::string what = fmt::format("{} on {}, {} micro-batches, {} chunks", row.name, row.shape.ranks,
                                         row.shape.micro_batches, row.shape.chunks);
    EXPECT_NEAR(simulation.bubble(), row.bubble, kNear) << what;
    const std::vector<double> got = peaks(simulation);
    for (size_t rank = 0; rank < got.size(); ++rank)
      EXPECT_NEAR(got[rank], row.peaks[row.peaks.size() == 1 ? 0 : rank], kNear) << what << ", rank " << rank;
  }
}

TEST(Schedule, OfTwiceTheMemoryLeavesNoRankIdleBetweenItsFirstAndLastPass) {
  for (const int64_t ranks : {2, 4, 8}) {
    const Schedule schedule = make_schedule(ScheduleName::kZbH2, {ranks, 4 * ranks, 1});
    for (const RankTimeline& rank : simulate(schedule).ranks)
      EXPECT_NEAR(rank.last - rank.first, rank.busy, kNear) << ranks;
  }
}

std::string line_of(const Schedule& schedule, size_t rank, size_t count) {
  std::string line;
  for (size_t i = 0; i < count; ++i) line += (i > 0 ? " " : "") + to_text(schedule.ranks[rank][i]);
  return line;
}

TEST(Schedule, HasTheOrderOfPyTorchsGenerators) {
  const Schedule zero_bubble = make_schedule(ScheduleName::kInterleavedZb, {4, 8, 1});
  EXPECT_EQ(line_of(zero_bubble, 0, 12), "0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2");
  EXPECT_EQ(line_of(zero_bubble, 3, 12), "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1");
  const Schedule there_and_back = make_schedule(ScheduleName::kZbV, {4, 8, 1});
  EXPECT_EQ(line_of(there_and_back, 3, 13), "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0");
}

void expect_unrunnable(const Schedule& schedule, const PassCosts& costs, const std::string& words) {
  try {
    simulate(schedule, costs);
    ADD_FAILURE() << "nothing was refused: " << words;
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

Schedule csv(const char* text) {
  return from_csv(text, Placement::kLoop, "mine");
}

TEST(Simulate, NamesTheFirstPassThatIsWrong) {
  expect_unrunnable(csv("0F0,0B0\n1F0,1F0,1B0"), {}, "rank 1 runs 1F0 twice");
  expect_unrunnable(csv("0F0,0B0\n1F0,1B0,1W0"), {}, "rank 1 runs 1W0 twice");
  expect_unrunnable(csv("0F0,0B0\n1F0,1I0,1I0,1W0"), {}, "rank 1 runs 1I0 twice");
  expect_unrunnable(csv("0F0,0B0\n1F0"), {}, "rank 1 never runs 1I0");
  expect_unrunnable(csv("0F0,0B0\n,"), {}, "rank 1 has no stage");
  expect_unrunnable(csv("0F0,0F1,0B0\n1F0,1F1,1B0,1B1"), {}, "rank 0 never runs 0I1");
  expect_unrunnable(csv("0F0,0B0,1F0\n1B0"), {}, "rank 0 runs 1F0, but stage 1 is on rank 1");
  expect_unrunnable(csv("0B0,0F0\n1F0,1B0"), {}, "deadlocks: rank 0 at 0B0, rank 1 at 1F0");
  expect_unrunnable(csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"), {}, "rank 0 at 0B0, rank 1 at 1F1");
  PassCosts small;
  small.memory_limit = 1.5;
  expect_unrunnable(make_schedule(ScheduleName::kGpipe, {2, 4, 1}), small,
                    "rank 0 holds 2 of activations after 0F1");
  PassCosts uneven;
  uneven.forward = {1.0, 2.0, 3.0};
  expect_unrunnable(make_schedule(ScheduleName::kGpipe, {2, 4, 1}), uneven, "3 costs for 2 stages");
}

TEST(Simulate, CountsWhatBothPassesOfAPairHold) {
  const Schedule pair = csv("0F0,0F1+0B0,0B1\n1F0,1B0,1F1,1B1");
  PassCosts costs;
  costs.overlapped_share = 1.0;
  costs.memory_limit = 2.0;
  EXPECT_EQ(simulate(pair, costs).ranks[0].peak_bytes, 2.0);
  costs.memory_limit = 1.0;
  expect_unrunnable(pair, costs, "rank 0 holds 2 of activations after 0F1");
  costs.overlapped_share = 0.0;
  expect_unrunnable(pair, costs, "rank 0 holds 2 of activations after 0F1");
}

TEST(Simulate, OverlapsAForwardPassWithABackwardPassAndNothingElse) {
  expect_unrunnable(csv("0F0+0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), {}, "rank 0 overlaps 0F0+0F1");
  expect_unrunnable(csv("0F0,0F1,0B0+0B1\n1F0,1B0,1F1,1B1"), {}, "rank 0 overlaps 0B0+0B1");
  expect_unrunnable(csv("0F0,0F1,0I0+0W0,0B1\n1F0,1B0,1F1,1B1"), {}, "rank 0 overlaps 0I0+0W0");
  Schedule ends = csv("0F0,0B0");
  ends.ranks[0].back().with_next = true;
  expect_unrunnable(ends, {}, "nothing follows 0B0");
  for (const char* broken : {"0F0,0B0+", "+0F0,0B0", "0F0,0F1+,0B0,0B1", "0F0,0F1,+0B0,0B1", "0F0++0B0", "+"})
    EXPECT_THROW(csv(broken), ConfigError) << broken;
}

TEST(Simulate, ReadsSchedulesOfOnesOwn) {
  const Schedule mine = csv(" 0F0 , 0F1,,0B0,0B1 \n\n1F0,1I0,1F1,1B1,1W0\n");
  EXPECT_EQ(mine.ranks.size(), 2u);
  EXPECT_EQ(mine.ranks[1][4], (StagePass{ActionKind::kBackwardWeight, 1, 0}));
  EXPECT_GT(simulate(mine).makespan, 0.0);
  for (const char* broken : {"0F0,x", "0F", "F0", "0X0", "-1F0", "0F0.5", "0F99999999999999999999", "",
                             "\n,\n", "9223372036854775807F0", "0F4294967296,0B4294967296", "0F100,0B100",
                             "7F0,7B0", "0F0,1F0,2F0,0F1,0F2"})
    EXPECT_THROW(csv(broken), ConfigError) << broken;
}

TEST(Simulate, TransfersAndUnevenStagesDelayWhatTheyShould) {
  PassCosts costs;
  costs.transfer = 0.5;
  // 3 forward passes, then 3 backward passes of 2, with 4 transfers on the way.
  EXPECT_NEAR(simulate(make_schedule(ScheduleName::kGpipe, {3, 1, 1}), costs).makespan, 3 + 6 + 4 * 0.5,
              kNear);
  costs.transfer = 0.0;
  costs.forward = {1.0, 5.0};
  costs.backward_input = {1.0, 5.0};
  costs.backward_weight = {1.0, 5.0};
  const Simulation uneven = simulate(make_schedule(ScheduleName::k1F1B, {2, 8, 1}), costs);
  EXPECT_NEAR(uneven.makespan, 1 + 8 * 15 + 2, kNear);
  EXPECT_NEAR(uneven.efficiency(), 8 * 18 / (2 * uneven.makespan), kNear);
}

/// Where activations are computed again, a micro-batch holds most between both halves of its backward pass:
/// room for that is left before its forward pass, and the simulator counts it.
TEST(Greedy, LeavesRoomForWhatBackwardAdds) {
  PassCosts costs;
  costs.activation_bytes = {0.25};
  costs.between_halves_bytes = {1.0};
  for (const double limit : {1.0, 2.0, 3.5}) {
    costs.memory_limit = limit;
    for (const Placement placement : {Placement::kLoop, Placement::kV}) {
      if (placement == Placement::kV && limit < 2.0) continue;  // a micro-batch takes two stages of a rank
      const Schedule schedule = greedy_schedule({.ranks = 4, .micro_batches = 8}, placement, costs);
      for (const double peak : peaks(simulate(schedule, costs))) EXPECT_LE(peak, limit + kNear);
    }
  }
  costs.memory_limit = 0.0;
  const Schedule zb_h1 = make_schedule(ScheduleName::kZbH1, {1, 4});
  EXPECT_NEAR(peaks(simulate(zb_h1, costs))[0], 1.0, kNear) << "one micro-batch at a time, behind B";
}

TEST(Greedy, UsesTheMemoryThatItIsGivenAndNoMore) {
  double before = 1e9;
  for (const double limit : {1.0, 2.0, 3.0, 4.0, 8.0}) {
    PassCosts costs;
    costs.memory_limit = limit;
    const Simulation simulation = simulate(greedy_schedule({4, 8, 1}, Placement::kLoop, costs), costs);
    for (const double peak : peaks(simulation)) EXPECT_LE(peak, limit);
    EXPECT_LE(simulation.makespan, before) << limit;
    before = simulation.makespan;
  }
  PassCosts none;
  none.memory_limit = 0.5;
  EXPECT_THROW(greedy_schedule({4, 8, 1}, Placement::kLoop, none), ConfigError);
}

TEST(Greedy, RefusesMoreRanksThanThereIsMemoryFor) {
  EXPECT_THROW(greedy_schedule({.ranks = int64_t{1} << 50, .micro_batches = 8}, Placement::kV, {}),
               ConfigError);
}

}  // namespace
}  // namespace trireme::plan
