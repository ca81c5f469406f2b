#include "trireme/plan/flat_layout.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::plan {
namespace {

/// Between one and twelve parameters of one or two dimensions, drawn from `seed`.
std::vector<ParamSpec> small_params(uint64_t seed) {
  std::vector<ParamSpec> params;
  const uint64_t count = 1 + mix64(seed, 0) % 12;
  for (uint64_t i = 0; i < count; ++i) {
    std::vector<int64_t> shape = {static_cast<int64_t>(1 + mix64(seed, 2 * i + 1) % 37)};
    if (mix64(seed, 2 * i + 2) % 2 == 0)
      shape.push_back(static_cast<int64_t>(1 + mix64(seed, 2 * i + 2) % 11));
    params.push_back({fmt::format("p{}", i), shape});
  }
  return params;
}

template <typename Law>
void for_random_layouts(Law law) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const std::vector<ParamSpec> params = small_params(seed);
    for (const int64_t shards : {1, 2, 3, 4, 7, 8, 64}) {
      for (const int64_t alignment : {1, 4, 8, 32})
        law(params, FlatLayout(params, shards, alignment), alignment);
    }
  }
}

TEST(FlatLayout, KeepsNamesShapesAndOrder) {
  for_random_layouts([](const auto& params, const FlatLayout& layout, int64_t) {
    ASSERT_EQ(layout.entries().size(), params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(layout.entries()[i].name, params[i].name);
      EXPECT_EQ(layout.entries()[i].shape, params[i].shape);
      EXPECT_EQ(layout.entries()[i].numel, params[i].numel());
    }
  });
}

TEST(FlatLayout, ParametersDoNotOverlapAndFitIn) {
  for_random_layouts([](const auto&, const FlatLayout& layout, int64_t) {
    int64_t free_from = 0;
    for (const FlatEntry& entry : layout.entries()) {
      EXPECT_GE(entry.offset, free_from);
      free_from = entry.end();
    }
    EXPECT_LE(free_from, layout.numel());
  });
}

TEST(FlatLayout, ParametersAndShardsAreAligned) {
  for_random_layouts([](const auto&, const FlatLayout& layout, int64_t alignment) {
    for (const FlatEntry& entry : layout.entries()) EXPECT_EQ(entry.offset % alignment, 0);
    EXPECT_EQ(layout.shard_numel() % alignment, 0);
  });
}

TEST(FlatLayout, ShardsPartitionTheBuffer) {
  for_random_layouts([](const auto&, const FlatLayout& layout, int64_t) {
    int64_t covered = 0;
    for (int64_t rank = 0; rank < layout.shards(); ++rank) {
      EXPECT_EQ(layout.shard(rank).begin, covered);
      EXPECT_EQ(layout.shard(rank).size(), layout.shard_numel());
      covered = layout.shard(rank).end;
    }
    EXPECT_EQ(covered, layout.numel());
  });
}

TEST(FlatLayout, PaddingIsTheRestAndSmallerThanItsBound) {
  for_random_layouts([](const auto& params, const FlatLayout& layout, int64_t alignment) {
    int64_t used = 0;
    for (const ParamSpec& param : params) used += param.numel();
    EXPECT_EQ(layout.padding(), layout.numel() - used);
    // Each parameter leaves a gap below the alignment, and each shard grows by less than the alignment.
    const auto gaps = static_cast<int64_t>(params.size()) + layout.shards();
    EXPECT_LE(layout.padding(), gaps * alignment);
  });
}

TEST(FlatLayout, NeighboursTouchWhenSizesAreMultiplesOfTheAlignment) {
  const FlatLayout layout({{"q", {64, 64}}, {"k", {32, 64}}, {"v", {32, 64}}}, 4);
  EXPECT_EQ(layout.entry("q").end(), layout.entry("k").offset);
  EXPECT_EQ(layout.entry("k").end(), layout.entry("v").offset);
  EXPECT_EQ(layout.padding(), 0);  // 128 * 64 elements divide into four aligned shards
}

TEST(FlatLayout, GapsAndTailAreAsComputedByHand) {
  // 3 elements at 0, 5 at 8, 1 at 16: 17 used or skipped, in two shards of 9 rounded up to 16.
  const FlatLayout layout({{"a", {3}}, {"b", {5}}, {"c", {1}}}, 2, 8);
  EXPECT_EQ(layout.entry("b").offset, 8);
  EXPECT_EQ(layout.entry("c").offset, 16);
  EXPECT_EQ(layout.shard_numel(), 16);
  EXPECT_EQ(layout.padding(), 32 - 9);
}

TEST(FlatLayout, EntriesDecayAsTheirParametersDo) {
  const FlatLayout layout(
      {{"matrix", {2, 3}}, {"vector", {3}}, {.name = "scale", .shape = {3}, .decays = true}}, 1);
  EXPECT_TRUE(layout.entry("matrix").decays);
  EXPECT_FALSE(layout.entry("vector").decays);
  EXPECT_TRUE(layout.entry("scale").decays) << "what a record says goes before the rule";
}

TEST(FlatLayout, UnknownParameterIsAnError) {
  EXPECT_THROW(FlatLayout({{"a", {3}}}, 1).entry("b"), LogicError);
  EXPECT_THROW(FlatLayout({{"a", {3}}}, 0), LogicError);
}

TEST(Range, IntersectionIsEmptyOrInsideBoth) {
  for (int64_t a = 0; a < 6; ++a) {
    for (int64_t b = 0; b < 6; ++b) {
      const Range left{a, a + 3}, right{b, b + 2};
      int64_t common = 0;
      for (int64_t x = 0; x < 12; ++x) {
        common += (x >= left.begin && x < left.end && x >= right.begin && x < right.end) ? 1 : 0;
      }
      EXPECT_EQ(intersect(left, right).size(), common);
    }
  }
}

}  // namespace
}  // namespace trireme::plan
