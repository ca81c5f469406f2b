#include "trireme/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

std::vector<int64_t> permutation(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> values;
  for (int64_t position = 0; position < size; ++position)
    values.push_back(permuted(position, size, seed, epoch));
  return values;
}

std::vector<int64_t> identity(int64_t size) {
  std::vector<int64_t> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

std::vector<int64_t> sorted(std::vector<int64_t> values) {
  std::ranges::sort(values);
  return values;
}

TEST(Permuted, IsABijectionOfEverySize) {
  std::vector<int64_t> sizes = identity(501);
  sizes.insert(sizes.end(), {1023, 1024, 1025, 4096, 4097, 7919, 65537});
  for (const int64_t size : sizes) {
    if (size == 0) continue;
    ASSERT_EQ(sorted(permutation(size, 42, 0)), identity(size)) << size;
    ASSERT_EQ(sorted(permutation(size, ~uint64_t{0}, 1000)), identity(size)) << size;
  }
}

TEST(Permuted, IsTheSameForTheSameSeedAndEpoch) {
  EXPECT_EQ(permutation(1000, 7, 3), permutation(1000, 7, 3));
}

/// Two random permutations agree at about one position (Poisson), whatever the size.
int agreements(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  int count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += a[i] == b[i];
  return count;
}

TEST(Permuted, DiffersBetweenSeedsEpochsAndFromTheIdentity) {
  for (const int64_t size : {100, 1000, 5000}) {
    const std::vector<int64_t> base = permutation(size, 42, 0);
    for (int step = 1; step <= 20; ++step) {
      EXPECT_LE(agreements(base, permutation(size, 42, step)), 12) << size << " epoch " << step;
      EXPECT_LE(agreements(base, permutation(size, 42 + static_cast<uint64_t>(step), 0)), 12) << size;
    }
    EXPECT_LE(agreements(base, identity(size)), 12) << size;
  }
}

TEST(Permuted, SendsEveryPositionEverywhereEquallyOften) {
  constexpr int kSeeds = 4000;
  for (const int64_t size : {3, 10, 16, 37}) {
    std::vector<int> counts(static_cast<size_t>(size * size));
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      for (int64_t p = 0; p < size; ++p) ++counts[static_cast<size_t>(p * size + permuted(p, size, seed, 0))];
    }
    const double expected = static_cast<double>(kSeeds) / static_cast<double>(size);
    double chi_square = 0.0;
    for (const int count : counts) chi_square += (count - expected) * (count - expected) / expected;
    // (n - 1)^2 degrees of freedom scaled by n / (n - 1): mean n (n - 1), standard deviation n sqrt(2).
    const auto n = static_cast<double>(size);
    EXPECT_NEAR(chi_square, n * (n - 1.0), 6.0 * n * std::sqrt(2.0)) << "size " << size;
  }
}

TEST(Permuted, StaysInRangeForHugeSizes) {
  for (const int64_t size : {(int64_t{1} << 40) + 1, int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
    for (int64_t i = 0; i < 100; ++i) {
      const int64_t value = permuted(size / 100 * i, size, 1, 2);
      ASSERT_TRUE(value >= 0 && value < size) << size;
    }
  }
}

TEST(Permuted, RefusesPositionsOutside) {
  EXPECT_THROW(permuted(-1, 10, 0, 0), LogicError);
  EXPECT_THROW(permuted(10, 10, 0, 0), LogicError);
  EXPECT_THROW(permuted(0, 0, 0, 0), LogicError);
}

TEST(SampleIndices, VisitEverySampleOncePerEpoch) {
  const SamplerOptions options{.samples = 123, .seed = 9};
  const std::vector<int64_t> three_epochs = sample_indices(options, 0, 3 * 123);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    const auto begin = three_epochs.begin() + epoch * 123;
    EXPECT_EQ(sorted({begin, begin + 123}), identity(123));
    EXPECT_EQ(std::vector<int64_t>(begin, begin + 123), permutation(123, 9, epoch));
  }
}

TEST(SampleIndices, AreTheSameGlobalBatchForAnyNumberOfRanks) {
  const SamplerOptions options{.samples = 50, .seed = 3};
  constexpr int64_t kGlobal = 24;
  for (int64_t step = 0; step < 8; ++step) {
    const std::vector<int64_t> whole = sample_indices(options, step * kGlobal, kGlobal);
    for (const int64_t ranks : {1, 2, 3, 4, 6, 8, 12, 24}) {
      std::vector<int64_t> joined;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t part = kGlobal / ranks;
        const std::vector<int64_t> mine = sample_indices(options, step * kGlobal + rank * part, part);
        joined.insert(joined.end(), mine.begin(), mine.end());
      }
      EXPECT_EQ(joined, whole) << ranks << " ranks";
    }
  }
}

TEST(SampleIndices, FollowTheOrderWithoutShuffling) {
  EXPECT_EQ(sample_indices({.samples = 5, .seed = 1, .shuffle = false}, 3, 9),
            (std::vector<int64_t>{3, 4, 0, 1, 2, 3, 4, 0, 1}));
  EXPECT_TRUE(sample_indices({.samples = 5}, 3, 0).empty());
}

TEST(SampleIndices, RefuseADatasetWithoutSamples) {
  EXPECT_THROW(sample_indices({.samples = 0}, 0, 1), LogicError);
}

}  // namespace
}  // namespace trireme::data
