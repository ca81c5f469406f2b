// The kernel against an independent recursion, bit for bit, and the law that makes hybrid groups agree.
#include "trireme/kernels/tree_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme {
namespace {

using Rows = std::vector<std::vector<float>>;

/// Values of very different size, so that another order of additions would give other bits.
float value_at(uint64_t rank, uint64_t index) {
  const uint64_t bits = mix64(rank, index);
  const double mantissa = static_cast<double>(bits >> 11) / 9007199254740992.0 - 0.5;
  return static_cast<float>(std::ldexp(mantissa, static_cast<int>(bits % 20)));
}

Rows make_rows(int64_t ranks, int64_t count) {
  Rows rows(static_cast<size_t>(ranks), std::vector<float>(static_cast<size_t>(count)));
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t i = 0; i < rows[r].size(); ++i) rows[r][i] = value_at(r, i);
  }
  return rows;
}

std::vector<float> sum_of(const Rows& rows, int64_t count) {
  std::vector<const float*> pointers;
  for (const auto& row : rows) pointers.push_back(row.data());
  std::vector<float> out(static_cast<size_t>(count), -7.0f);
  kernels::tree_sum(out.data(), pointers, count);
  return out;
}

float explicit_tree(const Rows& rows, size_t lo, size_t hi, size_t i) {
  if (hi - lo == 1) return rows[lo][i];
  size_t left = 1;
  while (2 * left < hi - lo) left *= 2;
  const volatile float a = explicit_tree(rows, lo, lo + left, i);  // no excess precision, no reassociation
  const volatile float b = explicit_tree(rows, lo + left, hi, i);
  return a + b;
}

uint32_t bits(float value) {
  return std::bit_cast<uint32_t>(value);
}

TEST(TreeSum, EqualsTheExplicitTreeBitForBit) {
  for (int64_t ranks = 1; ranks <= 19; ++ranks) {
    for (const int64_t count : {0, 1, 7, 1023, 1024, 1025, 20000}) {
      const Rows rows = make_rows(ranks, count);
      const std::vector<float> got = sum_of(rows, count);
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(bits(got[i]), bits(explicit_tree(rows, 0, rows.size(), i)))
            << ranks << " ranks, element " << i;
      }
    }
  }
}

TEST(TreeSum, IsCloseToTheExactSum) {
  const Rows rows = make_rows(13, 3000);
  const std::vector<float> got = sum_of(rows, 3000);
  for (size_t i = 0; i < got.size(); ++i) {
    long double exact = 0.0L, magnitude = 0.0L;
    for (const auto& row : rows) {
      exact += row[i];
      magnitude += std::fabs(row[i]);
    }
    // A tree of depth 4 rounds at most 4 times on any path (Higham 2002, section 4.2).
    EXPECT_LE(std::fabs(static_cast<long double>(got[i]) - exact), 4 * 0x1p-24L * magnitude * 1.001L) << i;
  }
}

TEST(TreeSum, OrderMattersForTheseValues) {
  const Rows rows = make_rows(4, 1000);
  const std::vector<float> got = sum_of(rows, 1000);
  int64_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    volatile float chain = rows[0][i];
    for (size_t r = 1; r < 4; ++r) chain = chain + rows[r][i];
    different += bits(chain) != bits(got[i]);
  }
  EXPECT_GT(different, 50) << "the bit-for-bit tests would not notice another order";
}

TEST(TreeSum, ContiguousGroupsOfAPowerOfTwoAreSubtrees) {
  constexpr int64_t kElements = 500;
  for (const int64_t group : {1, 2, 4, 8}) {
    for (int64_t groups = 1; groups <= 6; ++groups) {
      const Rows rows = make_rows(group * groups, kElements);
      Rows partial;
      for (int64_t g = 0; g < groups; ++g) {
        partial.push_back(sum_of(Rows(rows.begin() + g * group, rows.begin() + (g + 1) * group), kElements));
      }
      const auto flat = sum_of(rows, kElements), nested = sum_of(partial, kElements);
      EXPECT_EQ(std::memcmp(flat.data(), nested.data(), flat.size() * sizeof(float)), 0)
          << groups << " groups of " << group;
    }
  }
}

TEST(TreeSum, WidensBf16BeforeItAdds) {
  for (const int64_t ranks : {1, 2, 3, 8, 11}) {
    constexpr int64_t kElements = 1500;
    Rows rows = make_rows(ranks, kElements);
    std::vector<std::vector<uint16_t>> narrow;
    std::vector<const uint16_t*> pointers;
    for (auto& row : rows) {
      narrow.emplace_back();
      for (float& value : row) {
        narrow.back().push_back(static_cast<uint16_t>(bits(value) >> 16));
        value = std::bit_cast<float>(bits(value) & 0xffff0000u);
      }
    }
    for (const auto& row : narrow) pointers.push_back(row.data());
    std::vector<float> out(kElements);
    kernels::tree_sum_bf16(out.data(), pointers, kElements);
    const std::vector<float> wanted = sum_of(rows, kElements);
    EXPECT_EQ(std::memcmp(out.data(), wanted.data(), sizeof(float) * kElements), 0) << ranks << " ranks";
  }
}

TEST(TreeSum, RefusesNoRows) {
  float out = 0.0f;
  EXPECT_THROW(kernels::tree_sum(&out, {}, 1), LogicError);
}

}  // namespace
}  // namespace trireme
