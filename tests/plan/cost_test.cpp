#include "trireme/plan/cost.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce, Collective::kAllGather, Collective::kReduceScatter,
                               Collective::kAllToAll,  Collective::kBroadcast, Collective::kReduce,
                               Collective::kGather,    Collective::kScatter,   Collective::kSend,
                               Collective::kRecv,      Collective::kBarrier};

TEST(Cost, WireBytesFollowTheRingFormulas) {
  for (int64_t n = 1; n <= 16; ++n) {
    const int64_t bytes = n * 4096;
    const int64_t share = bytes / n * (n - 1);
    EXPECT_EQ(wire_bytes(Collective::kAllReduce, bytes, n), 2 * share);
    EXPECT_EQ(wire_bytes(Collective::kAllGather, bytes, n), share);
    EXPECT_EQ(wire_bytes(Collective::kReduceScatter, bytes, n), share);
    EXPECT_EQ(wire_bytes(Collective::kAllToAll, bytes, n), share);
    EXPECT_EQ(wire_bytes(Collective::kGather, bytes, n), share);
    EXPECT_EQ(wire_bytes(Collective::kScatter, bytes, n), share);
    EXPECT_EQ(wire_bytes(Collective::kSend, bytes, n), bytes);
    EXPECT_EQ(wire_bytes(Collective::kRecv, bytes, n), 0);
    EXPECT_EQ(wire_bytes(Collective::kBarrier, bytes, n), 0);
  }
}

TEST(Cost, AllReduceIsReduceScatterThenAllGather) {
  for (int64_t n = 1; n <= 9; ++n) {
    for (const int64_t bytes : {0, 1, 7, 4096, 1000003}) {
      EXPECT_EQ(
          wire_bytes(Collective::kAllReduce, bytes, n),
          wire_bytes(Collective::kReduceScatter, bytes, n) + wire_bytes(Collective::kAllGather, bytes, n));
      EXPECT_EQ(steps(Collective::kAllReduce, n),
                steps(Collective::kReduceScatter, n) + steps(Collective::kAllGather, n));
    }
  }
}

TEST(Cost, BroadcastAndReduceSendTheWholeBuffer) {
  for (const Collective collective : {Collective::kBroadcast, Collective::kReduce}) {
    EXPECT_EQ(wire_bytes(collective, 1000, 4), 1000);
    EXPECT_EQ(wire_bytes(collective, 1000, 1), 0);
  }
}

TEST(Cost, ALoneRankSendsNothingInAGroup) {
  for (const Collective collective : kAll) {
    if (collective == Collective::kSend) continue;  // to oneself or not, it is one message
    EXPECT_EQ(wire_bytes(collective, 4096, 1), 0) << name(collective);
  }
}

TEST(Cost, BuffersOfTerabytesDoNotOverflow) {
  const int64_t bytes = int64_t{1} << 60;
  EXPECT_EQ(wire_bytes(Collective::kAllGather, bytes, 1024), bytes / 1024 * 1023);
}

TEST(Cost, StepsOfTheRing) {
  EXPECT_EQ(steps(Collective::kAllReduce, 8), 14);
  EXPECT_EQ(steps(Collective::kAllGather, 8), 7);
  EXPECT_EQ(steps(Collective::kReduceScatter, 8), 7);
  for (const Collective one : {Collective::kSend, Collective::kBroadcast, Collective::kReduce,
                               Collective::kGather, Collective::kScatter})
    EXPECT_EQ(steps(one, 8), 1);
  EXPECT_EQ(steps(Collective::kAllReduce, 1), 0);
}

TEST(Cost, NamesAreDistinct) {
  std::set<std::string_view> names;
  for (const Collective collective : kAll) names.insert(name(collective));
  EXPECT_EQ(names.size(), std::size(kAll));
}

TEST(Cost, RefusesWorldsWithoutRanks) {
  EXPECT_THROW(wire_bytes(Collective::kAllGather, 8, 0), LogicError);
  EXPECT_THROW(wire_bytes(Collective::kAllGather, -8, 2), LogicError);
}

}  // namespace
}  // namespace trireme::plan
