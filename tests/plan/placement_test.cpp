#include "trireme/plan/placement.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

const TensorPlacement kReplicate = TensorPlacement::replicate(), kPartial = TensorPlacement::partial();

TensorPlacement sharded(int64_t dim) {
  return TensorPlacement::shard(dim);
}

TEST(TensorPlacement, TextGoesBothWays) {
  EXPECT_EQ(to_text(kReplicate), "R");
  EXPECT_EQ(to_text(kPartial), "P");
  EXPECT_EQ(to_text(sharded(12)), "S(12)");
  for (const TensorPlacement& placement : {kReplicate, kPartial, sharded(0), sharded(3), sharded(12)})
    EXPECT_EQ(parse_placement(to_text(placement)), placement);
  for (const char* word : {"", "r", "RR", "S", "S(", "S()", "S(-1)", "S(+1)", "S(01)", "S( 1)", "S(1",
                           "S(1))", "S(1)x", "S(x)", "S(99999999999999999999)"})
    EXPECT_EQ(parse_placement(word), std::nullopt) << word;
}

TEST(TensorPlacement, SlicesCoverADimensionAsEvenlyAsPossible) {
  for (int64_t ranks = 1; ranks <= 7; ++ranks) {
    for (int64_t size = 0; size <= 20; ++size) {
      int64_t end = 0, longest = 0, shortest = size;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Range range = shard_range(size, ranks, rank);
        EXPECT_EQ(range.begin, end);
        EXPECT_TRUE(rank == 0 || range.size() <= shard_range(size, ranks, rank - 1).size());
        end = range.end;
        longest = std::max(longest, range.size());
        shortest = std::min(shortest, range.size());
      }
      EXPECT_EQ(end, size);
      EXPECT_LE(longest - shortest, 1);
    }
  }
  EXPECT_EQ(shard_range(5, 3, 1), (Range{2, 4}));
  EXPECT_THROW(shard_range(5, 3, 3), LogicError);
  EXPECT_THROW(shard_range(5, 3, -1), LogicError);
  EXPECT_THROW(shard_range(-1, 3, 0), LogicError);
}

TEST(TensorPlacement, BytesAreThoseOfTheCollectives) {
  for (int64_t n = 1; n <= 8; ++n) {
    const int64_t part = 40 * n, whole = part * n;
    const auto bytes = [&](const TensorPlacement& from, const TensorPlacement& to) {
      return redistribute_bytes(from, to, whole, n);
    };
    EXPECT_EQ(bytes(sharded(1), kReplicate), (n - 1) * part) << "all-gather";
    EXPECT_EQ(bytes(kPartial, sharded(2)), (n - 1) * part) << "reduce-scatter";
    EXPECT_EQ(bytes(kPartial, kReplicate), 2 * (n - 1) * part) << "both";
    EXPECT_EQ(bytes(sharded(0), sharded(1)), (n - 1) * part / n) << "all-to-all";
    for (const auto& [from, to] : {std::pair(kReplicate, sharded(0)), std::pair(kReplicate, kPartial),
                                   std::pair(sharded(0), kPartial), std::pair(kReplicate, kReplicate),
                                   std::pair(kPartial, kPartial), std::pair(sharded(1), sharded(1))})
      EXPECT_EQ(bytes(from, to), 0) << to_text(from) << to_text(to);
  }
}

TEST(TensorPlacement, BytesOfUnevenSlicesAreThoseOfPaddedOnes) {
  // (5, 7) over 3 ranks: rows as (6, 7), columns as (5, 9), both as (6, 9), and 35 elements as 36.
  const auto bytes = [](const TensorPlacement& from, const TensorPlacement& to) {
    return redistribute_bytes(from, to, {5, 7}, 2, 3);
  };
  EXPECT_EQ(bytes(sharded(0), kReplicate), 2 * 42 * 2 / 3);
  EXPECT_EQ(bytes(kPartial, sharded(1)), 2 * 45 * 2 / 3);
  EXPECT_EQ(bytes(sharded(0), sharded(1)), 2 * 54 / 3 * 2 / 3);
  EXPECT_EQ(bytes(kPartial, kReplicate), 2 * 2 * 36 * 2 / 3);
  EXPECT_EQ(bytes(kReplicate, sharded(1)), 0);
  EXPECT_THROW(bytes(sharded(2), kReplicate), LogicError);
  EXPECT_EQ(redistribute_bytes(sharded(0), kReplicate, {6, 7}, 4, 3),
            redistribute_bytes(sharded(0), kReplicate, 4 * 42, 3));
}

}  // namespace
}  // namespace trireme::plan
