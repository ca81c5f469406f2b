#include "trireme/bench/collectives.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "tests/support/spawn.h"
#include "trireme/base/error.h"

namespace trireme::bench {
namespace {

TEST(CollectiveTimes, EveryWayOfCpuRanksIsTimedInEveryRound) {
  constexpr int64_t kRounds = 3, kRanks = 3;
  test::run_ranks(kRanks, [](std::shared_ptr<comm::World> world) {
    const std::vector<CollectiveTimes> times = time_collectives(world, {1, 2}, kRounds);
    std::set<std::string> ways;
    for (const CollectiveTimes& one : times) {
      ways.insert(one.operation + " by " + one.by + (one.in_place ? " in place" : ""));
      EXPECT_EQ(one.calls_ms.size(), static_cast<size_t>(kRounds));
      for (const double ms : one.calls_ms) EXPECT_GT(ms, 0.0);
      const int64_t elements = one.mib * (1 << 20) / 2 / kRanks;  // bf16, of one rank
      // nccl-tests: 2 (n - 1) / n of an all-reduce, 1 of what goes through each rank, else (n - 1) / n
      const bool whole = one.operation == "broadcast" || one.operation == "reduce";
      const int64_t shards = one.operation == "all_reduce" ? 2 * (kRanks - 1) : whole ? kRanks : kRanks - 1;
      EXPECT_EQ(one.wire_bytes, 2 * elements * shards) << one.operation;
      EXPECT_EQ(one.wrong, 0) << one.operation << " by " << one.by;
      EXPECT_NEAR(one.tensor_gb_per_s() * one.median_ms() * 1e6, static_cast<double>(one.mib << 20), 1.0);
      EXPECT_NEAR(one.gb_per_s() * one.median_ms() * 1e6, static_cast<double>(one.wire_bytes), 1.0);
    }
    EXPECT_EQ(ways,
              (std::set<std::string>{
                  "reduce_scatter by ordered, peer memory", "reduce_scatter by ordered, messages",
                  "all_gather by peer memory", "all_gather by peer memory in place", "all_gather by backend",
                  "all_gather by backend in place", "all_reduce by backend in place", "all_to_all by backend",
                  "broadcast by backend in place", "reduce by backend in place", "gather by backend",
                  "gather by backend in place", "scatter by backend", "scatter by backend in place"}));
    EXPECT_EQ(times.size(), 2 * ways.size());
  });
}

TEST(CollectiveTimes, WrongElementsOfAllRanksAreCounted) {
  test::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto all = world->make_group("all", {0, 1});
    const at::Tensor expected = at::arange(6, at::kFloat);
    at::Tensor output = expected.to(at::kBFloat16);
    EXPECT_EQ(count_wrong(*all, output, expected), 0);
    output[4] = std::nan("");
    if (world->rank() == 1) output[0] = 1.0;
    EXPECT_EQ(count_wrong(*all, output, expected), 3);
  });
}

TEST(PairTimes, AreOfEveryOrderedPairAndTheSameOnEveryRank) {
  test::run_ranks(3, [](std::shared_ptr<comm::World> world) {
    const std::vector<PairTimes> pairs = time_pairs(world, 1, 2);
    const auto all = world->make_group("all", {0, 1, 2});
    std::set<std::pair<int64_t, int64_t>> seen;
    for (const PairTimes& pair : pairs) {
      seen.insert({pair.from, pair.to});
      EXPECT_NE(pair.from, pair.to);
      EXPECT_GT(pair.latency_us, 0.0);
      EXPECT_GT(pair.gb_per_s, 0.0);
      const auto everyone = comm::gather_scalars(*all, {pair.gb_per_s});
      for (const auto& other : everyone) EXPECT_EQ(other[0], pair.gb_per_s);
    }
    EXPECT_EQ(seen.size(), 6u);
    EXPECT_EQ(pairs.size(), 6u);
  });
}

TEST(CollectiveTimes, TheMedianIsOfTheRounds) {
  EXPECT_EQ((CollectiveTimes{.calls_ms = {5.0, 1.0, 9.0}}).median_ms(), 5.0);
  EXPECT_THROW(CollectiveTimes{}.median_ms(), LogicError);
}

}  // namespace
}  // namespace trireme::bench
