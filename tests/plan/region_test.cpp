#include "trireme/plan/region.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <limits>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::plan {
namespace {

/// Elements of a region one by one, by the definition: coordinates in the box, then in the tensor.
std::vector<int64_t> elements_of(const Shape& shape, const Region& region) {
  std::vector<int64_t> elements;
  for (int64_t i = region.range.begin; i < region.range.end; ++i) {
    int64_t rest = i, element = 0, stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      element += (region.start[dim] + rest % region.extent[dim]) * stride;
      rest /= region.extent[dim];
      stride *= shape[dim];
    }
    elements.push_back(element);
  }
  return elements;
}

uint64_t random_below(uint64_t& state, uint64_t limit) {
  return mix64(17, state++) % limit;
}

Shape random_shape(uint64_t& state) {
  Shape shape(random_below(state, 5));
  for (int64_t& dim : shape) dim = static_cast<int64_t>(1 + random_below(state, 4));
  return shape;
}

Region random_region(const Shape& shape, uint64_t& state) {
  Region region = Region::whole(shape);
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const auto size = static_cast<uint64_t>(shape[dim]);
    region.start[dim] = static_cast<int64_t>(random_below(state, size));
    region.extent[dim] =
        static_cast<int64_t>(1 + random_below(state, size - static_cast<uint64_t>(region.start[dim])));
  }
  region = Region::box(region.start, region.extent);
  const auto numel = static_cast<uint64_t>(region.numel());
  const auto begin = static_cast<int64_t>(random_below(state, numel + 1));
  region.range = {
      begin, begin + static_cast<int64_t>(random_below(state, numel + 1 - static_cast<uint64_t>(begin)))};
  return region;
}

TEST(Region, RunsAreItsElementsInAscendingOrder) {
  uint64_t state = 0;
  for (int round = 0; round < 20000; ++round) {
    const Shape shape = random_shape(state);
    const Region region = random_region(shape, state);
    ASSERT_EQ(misfit(region, shape), "");
    std::vector<int64_t> elements;
    for (RunCursor cursor(shape, region); !cursor.done(); cursor.next()) {
      ASSERT_EQ(cursor.run().local, static_cast<int64_t>(elements.size()));
      ASSERT_GT(cursor.run().length, 0);
      for (int64_t i = 0; i < cursor.run().length; ++i) elements.push_back(cursor.run().begin + i);
    }
    ASSERT_EQ(elements, elements_of(shape, region));
    ASSERT_TRUE(std::ranges::is_sorted(elements));
  }
}

TEST(Region, WholeRowsAreOneRun) {
  const Shape shape = {6, 5, 4};
  EXPECT_EQ(RunCursor(shape, Region::box({2, 0, 0}, {3, 5, 4})).run().length, 60);
  EXPECT_EQ(RunCursor(shape, Region::box({2, 1, 0}, {1, 3, 4})).run().length, 12);
  EXPECT_EQ(RunCursor(shape, Region::box({2, 1, 1}, {1, 1, 2})).run().length, 2);
  EXPECT_EQ(RunCursor(shape, Region::flat(shape, {7, 99})).run().length, 92);
}

TEST(Region, IntersectionsAreWhatBothHave) {
  uint64_t state = 1'000'000;
  for (int round = 0; round < 20000; ++round) {
    const Shape shape = random_shape(state);
    const Region first = random_region(shape, state), second = random_region(shape, state);
    const std::vector<int64_t> a = elements_of(shape, first), b = elements_of(shape, second);
    std::vector<int64_t> common;
    std::ranges::set_intersection(a, b, std::back_inserter(common));
    std::vector<int64_t> found;
    int64_t last_a = -1, last_b = -1;
    intersect(shape, first, second, [&](int64_t from, int64_t to, int64_t count) {
      ASSERT_FALSE(from == last_a && to == last_b) << "neighbours came as two";
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(a.at(static_cast<size_t>(from + i)), b.at(static_cast<size_t>(to + i)));
        found.push_back(a[static_cast<size_t>(from + i)]);
      }
      last_a = from + count;
      last_b = to + count;
    });
    ASSERT_EQ(found, common);
  }
}

std::string coverage(const Shape& shape, const std::vector<Region>& regions) {
  std::vector<const Region*> pointers;
  for (const Region& region : regions) pointers.push_back(&region);
  return coverage_error(shape, pointers);
}

TEST(Region, CoverageCountsEveryElementOnce) {
  uint64_t state = 2'000'000;
  int whole = 0;
  for (int round = 0; round < 30000; ++round) {
    const Shape shape = random_shape(state);
    std::vector<Region> regions;
    if (round % 2 == 0) {
      for (uint64_t i = random_below(state, 4); i-- > 0;) regions.push_back(random_region(shape, state));
    } else {  // halves of halves, which do cover, unless one of them is then made shorter
      const Region left = share_of(Region::whole(shape), 0, 2), right = share_of(Region::whole(shape), 1, 2);
      regions = {share_of(left, 1, 2), right, share_of(left, 0, 2)};
      Region& changed = regions[random_below(state, regions.size())];
      if (round % 4 == 1 && changed.numel() > 0) ++changed.range.begin;
    }
    std::vector<int> counts(static_cast<size_t>(*checked_numel(shape)), 0);
    for (const Region& region : regions) {
      for (const int64_t element : elements_of(shape, region)) ++counts[static_cast<size_t>(element)];
    }
    const bool covers = std::ranges::all_of(counts, [](int count) { return count == 1; });
    ASSERT_EQ(coverage(shape, regions).empty(), covers) << coverage(shape, regions);
    whole += covers ? 1 : 0;
  }
  EXPECT_GT(whole, 5000);
  EXPECT_LT(whole, 25000);
}

TEST(Region, CoverageNamesTheElements) {
  const Shape shape = {2, 5};
  const auto flat = [&](int64_t begin, int64_t end) { return Region::flat(shape, {begin, end}); };
  EXPECT_EQ(coverage(shape, {flat(0, 10)}), "");
  EXPECT_EQ(coverage(shape, {}), "elements 0 to 10 are missing");
  EXPECT_EQ(coverage(shape, {flat(0, 3), flat(7, 10)}), "elements 3 to 7 are missing");
  EXPECT_EQ(coverage(shape, {flat(0, 9)}), "elements 9 to 10 are missing");
  EXPECT_EQ(coverage(shape, {flat(0, 6), flat(4, 10)}), "elements 4 to 6 occur twice");
  EXPECT_EQ(coverage(shape, {flat(0, 10), Region::box({1, 0}, {1, 1})}), "elements 5 to 6 occur twice");
  EXPECT_EQ(coverage({0, 5}, {}), "");
}

/// A trillion columns of one element are refused at once.
TEST(Region, CoverageDoesNotFollowMoreRunsThanAnyModelHas) {
  const int64_t rows = int64_t{1} << 40;
  const Region left = Region::box({0, 0}, {rows, 1}), right = Region::box({0, 1}, {rows, 1});
  EXPECT_NE(coverage({rows, 2}, {left, right}).find("runs"), std::string::npos);
}

TEST(Region, RefusesWhatIsNoPartOfTheTensor) {
  const Shape shape = {4, 6};
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(misfit(Region::whole(shape), shape), "");
  EXPECT_NE(misfit(Region::whole({4}), shape), "");
  EXPECT_NE(misfit({{0, 0}, {4, 7}, {0, 1}}, shape), "");
  EXPECT_NE(misfit({{1, 0}, {4, 6}, {0, 1}}, shape), "");
  EXPECT_NE(misfit({{-1, 0}, {2, 6}, {0, 1}}, shape), "");
  EXPECT_NE(misfit({{most, 0}, {1, 6}, {0, 1}}, shape), "");
  EXPECT_NE(misfit({{1, 0}, {most, 6}, {0, 1}}, shape), "");
  EXPECT_NE(misfit({{0, 0}, {4, 6}, {0, 25}}, shape), "");
  EXPECT_NE(misfit({{0, 0}, {4, 6}, {5, 4}}, shape), "");
  EXPECT_NE(misfit({{0, 0}, {4, 6}, {-1, 4}}, shape), "");
}

TEST(Region, CountsOfShapesDoNotOverflow) {
  EXPECT_EQ(checked_numel({}), 1);
  EXPECT_EQ(checked_numel({3, 0, 7}), 0);
  EXPECT_EQ(checked_numel({int64_t{1} << 31, int64_t{1} << 31}), int64_t{1} << 62);
  EXPECT_EQ(checked_numel({int64_t{1} << 32, int64_t{1} << 31}), std::nullopt);
  EXPECT_EQ(checked_numel({0, int64_t{1} << 32, int64_t{1} << 32}), std::nullopt);
  EXPECT_EQ(checked_numel({2, -1}), std::nullopt);
}

TEST(Region, SharesAreEqualWithinOneElementAndCover) {
  for (int64_t numel = 0; numel < 20; ++numel) {
    const Shape shape = {numel};
    for (int64_t count = 1; count < 9; ++count) {
      std::vector<Region> shares;
      for (int64_t i = 0; i < count; ++i) {
        shares.push_back(share_of(Region::whole(shape), i, count));
        EXPECT_LE(std::abs(shares.back().numel() * count - numel), count);
      }
      EXPECT_EQ(coverage(shape, shares), "");
    }
  }
}

}  // namespace
}  // namespace trireme::plan
