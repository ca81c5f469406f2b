// A head spread over the ranks of a pipeline, for every schedule over many shapes: complete, without waiting
// for ever, shorter than with the head in the last stage, and how much more is in flight.
#include "trireme/plan/spread_head.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "tests/plan/schedules.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/plan/lowering.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;

/// A rank's blocks take 1, 1 and 1 for each micro-batch; the head costs as much as `head` ranks' blocks, two
/// thirds of it forward.
struct Costs {
  PassCosts unspread, spread;
};

PassCosts block_costs(const Schedule& schedule) {
  PassCosts costs;
  costs.forward = costs.backward_input = costs.backward_weight =
      costs.activation_bytes = {1.0 / static_cast<double>(schedule.stages_per_rank())};
  return costs;
}

Costs costs_with_head(const Schedule& schedule, double head) {
  const PassCosts blocks = block_costs(schedule);
  Costs costs{blocks, with_head_parts(schedule, blocks, 2.0 * head, head, 0.0)};
  for (auto* values :
       {&costs.unspread.forward, &costs.unspread.backward_input, &costs.unspread.backward_weight}) {
    values->resize(static_cast<size_t>(schedule.stages), values->front());
    values->back() += head;
  }
  return costs;
}

void for_all_schedules_one_way(int64_t most_ranks,
                               const std::function<void(const Schedule&, const std::string&)>& body) {
  int64_t count = 0;
  for (const ScheduleName name : all_values<ScheduleName>()) {
    if (name == ScheduleName::kDualPipe) continue;
    for (int64_t ranks = 2; ranks <= most_ranks; ++ranks) {
      for (const int64_t micro_batches : {1, 2, 4, 5, 8, 16, 24}) {
        Schedule schedule;
        try {
          schedule = make_schedule(name, {ranks, micro_batches, has_chunks(name) ? 2 : 1});
        } catch (const ConfigError&) {
          continue;  // tests of the generators say which shapes these are
        }
        ++count;
        body(schedule, fmt::format("{} on {}, {} micro-batches", name, ranks, micro_batches));
      }
    }
  }
  EXPECT_GT(count, 100);
}

std::vector<StageActions> programs_of_all(const Schedule& schedule, int64_t ahead) {
  std::vector<StageActions> programs;
  for (int64_t rank = 0; rank < std::ssize(schedule.ranks); ++rank)
    programs.push_back(lower(schedule, rank, ahead));
  return programs;
}

/// simulate() refuses passes that are missing or come twice, and check_programs() what waits for ever.
TEST(SpreadHead, RunsToItsEndOnAllRanksForEverySchedule) {
  for_all_schedules_one_way(8, [](const Schedule& schedule, const std::string& what) {
    const Schedule spread = spread_head(schedule, costs_with_head(schedule, 1.0).spread);
    EXPECT_EQ(spread.all_stages(), schedule.stages + std::ssize(schedule.ranks)) << what;
    for (const int64_t ahead : {0, 1, 3}) {
      const auto programs = programs_of_all(spread, ahead);
      EXPECT_NO_THROW(check_programs(spread, programs)) << what << ", ahead " << ahead;
    }
  });
}

/// The order of each stage's passes decides in which order gradients are added up.
TEST(SpreadHead, KeepsTheOrderOfEachStage) {
  for_all_schedules_one_way(8, [](const Schedule& schedule, const std::string& what) {
    const Schedule spread = spread_head(schedule, costs_with_head(schedule, 1.0).spread);
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      for (const Kind kind : kPassKinds) {
        const auto of_kind = [&](const Schedule& from) {
          std::vector<std::pair<int64_t, int64_t>> found;
          for (const StagePass& pass : from.ranks[rank]) {
            if (pass.kind == kind && !spread.is_head_part(pass.stage))
              found.emplace_back(pass.stage, pass.micro_batch);
          }
          return found;
        };
        EXPECT_EQ(of_kind(spread), of_kind(schedule)) << what << ", rank " << rank;
      }
    }
  });
}

TEST(SpreadHead, IsNotLongerThanWithTheHeadInTheLastStage) {
  for_all_schedules_one_way(16, [](const Schedule& schedule, const std::string& what) {
    for (const double head : {0.5, 1.0, 3.0}) {
      const Costs costs = costs_with_head(schedule, head);
      const Simulation spread = simulate(spread_head(schedule, costs.spread), costs.spread),
                       unspread = simulate(schedule, costs.unspread);
      EXPECT_LE(spread.makespan, unspread.makespan + kNear) << what << ", head " << head;
      const auto micro_batches = static_cast<double>(schedule.micro_batches),
                 ranks = static_cast<double>(schedule.ranks.size());
      for (const RankTimeline& rank : spread.ranks)
        EXPECT_NEAR(rank.busy, 3.0 * micro_batches * (1.0 + head / ranks), kNear) << what;
      // With many micro-batches the head is what the unspread step waits for.
      if (schedule.micro_batches < 2 * std::ssize(schedule.ranks) || head < 1.0) continue;
      EXPECT_GT(spread.efficiency(), 1.2 * unspread.efficiency()) << what << ", head " << head;
    }
  });
}

/// No more than two micro-batches' activations on top, and logits of two more than the last stage had, and
/// one.
TEST(SpreadHead, HoldsAtMostTwoMicroBatchesMore) {
  for_all_schedules_one_way(8, [](const Schedule& schedule, const std::string& what) {
    const Costs costs = costs_with_head(schedule, 1.0);
    const Schedule made = spread_head(schedule, costs.spread);
    const Simulation spread = simulate(made, costs.spread), before = simulate(schedule, costs.unspread);
    const int64_t last = schedule.stages - 1;
    const auto most_at_once = [](const Schedule& of, int64_t stage) {
      int64_t now = 0, most = 0;
      for (const StagePass& pass : of.ranks[static_cast<size_t>(of.rank_of(stage, 0))]) {
        if (pass.stage != stage || pass.kind == Kind::kBackwardWeight) continue;
        now += pass.kind == Kind::kForward ? 1 : -1;
        most = std::max(most, now);
      }
      return most;
    };
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      EXPECT_LE(spread.ranks[rank].peak_bytes, before.ranks[rank].peak_bytes + 2.0 + kNear) << what;
      const int64_t extra = 2 * schedule.stages_per_rank() + 1;
      EXPECT_LE(most_at_once(made, schedule.stages + static_cast<int64_t>(rank)),
                most_at_once(schedule, last) + extra)
          << what;
    }
  });
}

TEST(SpreadHead, RunsForwardPassesAloneThroughAllParts) {
  for (const ScheduleName name : {ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
    const Schedule schedule = make_schedule(name, {4, 8, 2});
    const Schedule spread = spread_head(schedule, costs_with_head(schedule, 1.0).spread);
    for (const int64_t micro_batches : {1, 3, 9}) {
      const Schedule forwards = forward_only(spread, micro_batches);
      std::vector<StageActions> programs;
      for (int64_t rank = 0; rank < 4; ++rank) programs.push_back(lower_forward(forwards, rank));
      EXPECT_NO_THROW(check_programs(forwards, programs)) << plan::name(name);
      for (int64_t rank = 0; rank < 4; ++rank) {
        const auto of_part = std::ranges::count(forwards.ranks[static_cast<size_t>(rank)],
                                                schedule.stages + rank, &StagePass::stage);
        EXPECT_EQ(of_part, micro_batches);
      }
    }
  }
}

TEST(SpreadHead, SendsHiddenStatesPartsAndTotals) {
  const Schedule spread = [] {
    const Schedule schedule = make_schedule(ScheduleName::kGpipe, {2, 1, 1});
    return spread_head(schedule, costs_with_head(schedule, 1.0).spread);
  }();
  EXPECT_EQ(stage_text(lower(spread, 0)),
            "post 2H0 from 1 in 0\npost 0B0 from 1 in 0\npost 2T0 from 1 in 0\n"
            "forward 0F0\nsend 1F0 to 1\n"
            "recv 2H0 from 1 in 0\nforward 2F0\nsend 2P0 to 1\n"
            "recv 0B0 from 1 in 0\nbackward 0B0\n"
            "recv 2T0 from 1 in 0\nbackward 2B0\n");
  EXPECT_EQ(stage_text(lower(spread, 1)),
            "post 1F0 from 0 in 0\npost 2P0 from 0 in 0\n"
            "recv 1F0 from 0 in 0\nforward 1F0\nsend 2H0 to 0\n"
            "forward 3F0\n"
            "recv 2P0 from 0 in 0\nbackward 1B0\nsend 0B0 to 0\nsend 2T0 to 0\n"
            "backward 3B0\n");
}

TEST(SpreadHead, RefusesTwoWaysAndHalvesOfParts) {
  const Schedule two_ways = make_schedule(ScheduleName::kDualPipe, {4, 8, 1});
  test::expect_refusal([&] { spread_head(two_ways, {}); },
                       {"dualpipe has a copy of each stage", "spread_head=false"});
  Schedule forced = two_ways;
  forced.spread_head = true;
  test::expect_refusal([&] { simulate(forced); }, {"stages in one direction"});
  const Schedule schedule = make_schedule(ScheduleName::k1F1B, {2, 2, 1});
  Schedule spread = spread_head(schedule, costs_with_head(schedule, 1.0).spread);
  const auto part = std::ranges::find(spread.ranks[1], StagePass{Kind::kBackward, 3, 0});
  ASSERT_NE(part, spread.ranks[1].end());
  part->kind = Kind::kBackwardInput;
  test::expect_refusal([&] { simulate(spread); }, {"rank 1 runs 3I0", "part of the head", "write 3B0"});
  spread.ranks[1].erase(part);
  test::expect_refusal([&] { simulate(spread); }, {"rank 1 never runs 3I0"});
}

TEST(SpreadHead, ChecksWhatIsSent) {
  const Schedule schedule = make_schedule(ScheduleName::k1F1B, {2, 2, 1});
  const Schedule spread = spread_head(schedule, costs_with_head(schedule, 1.0).spread);
  const auto without = [&](size_t rank, const std::string& line) {
    auto programs = programs_of_all(spread, 1);
    const auto found = std::ranges::find_if(programs[rank],
                                            [&](const Action& action) { return stage_text(action) == line; });
    EXPECT_NE(found, programs[rank].end()) << stage_text(programs[rank]);
    if (found != programs[rank].end()) programs[rank].erase(found);
    return programs;
  };
  for (const auto& [rank, line] :
       {std::pair<size_t, std::string>{1, "send 2H0 to 0"}, {0, "send 2P1 to 1"}, {1, "send 2T1 to 0"}}) {
    const auto programs = without(rank, line);
    EXPECT_THROW(check_programs(spread, programs), LogicError) << line;
  }
}

}  // namespace
}  // namespace trireme::plan
