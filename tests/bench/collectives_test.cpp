#include "trireme/bench/collectives.h"

#include <gtest/gtest.h>

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
      ways.insert(one.operation + " by " + one.by);
      EXPECT_EQ(one.calls_ms.size(), static_cast<size_t>(kRounds));
      for (const double ms : one.calls_ms) EXPECT_GT(ms, 0.0);
      const int64_t elements = one.mib * (1 << 20) / 2 / kRanks;  // bf16, of one rank
      EXPECT_EQ(one.wire_bytes, 2 * elements * (kRanks - 1));
      EXPECT_NEAR(one.gb_per_s() * one.median_ms() * 1e6, static_cast<double>(one.wire_bytes), 1.0);
    }
    EXPECT_EQ(ways, (std::set<std::string>{"reduce_scatter by ordered, peer memory",
                                           "reduce_scatter by ordered, messages", "all_gather by peer memory",
                                           "all_gather by backend"}));
    EXPECT_EQ(times.size(), 2 * ways.size());
  });
}

TEST(CollectiveTimes, TheMedianIsOfTheRounds) {
  EXPECT_EQ((CollectiveTimes{.calls_ms = {5.0, 1.0, 9.0}}).median_ms(), 5.0);
  EXPECT_THROW(CollectiveTimes{}.median_ms(), LogicError);
}

}  // namespace
}  // namespace trireme::bench
