#include "trireme/kernels/tree_sum.h"

#include <array>
#include <bit>

#include "trireme/base/error.h"
#include "trireme/kernels/parallel.h"

namespace trireme::kernels {
namespace {

constexpr int64_t kCachedFloats = 1024;  // floats that one level of the tree keeps in cache
constexpr size_t kFused = 8;             // rows that are summed in registers

inline float widen(float value) {
  return value;
}
inline float widen(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <size_t kRows, typename Value>
inline float tree(const Value* const* rows, int64_t i) {
  if constexpr (kRows == 1) {
    return widen(rows[0][i]);
  } else {
    constexpr size_t left = std::bit_floor(kRows - 1);
    return tree<left>(rows, i) + tree<kRows - left>(rows + left, i);
  }
}

template <size_t kRows, typename Value>
void sum_fused(float* out, const Value* const* rows, int64_t first, int64_t count) {
  std::array<const Value*, kRows> row;
  for (size_t r = 0; r < kRows; ++r) row[r] = rows[r] + first;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] = tree<kRows>(row.data(), i);
}

template <typename Value>
using SumFused = void (*)(float*, const Value* const*, int64_t, int64_t);

template <typename Value>
constexpr std::array<SumFused<Value>, kFused> kSumFused = {
    sum_fused<1, Value>, sum_fused<2, Value>, sum_fused<3, Value>, sum_fused<4, Value>,
    sum_fused<5, Value>, sum_fused<6, Value>, sum_fused<7, Value>, sum_fused<8, Value>};

/// out (count <= kCachedFloats) = the tree over rows[..][first, first + count).
template <typename Value>
void sum_block(float* out, std::span<const Value* const> rows, int64_t first, int64_t count) {
  if (rows.size() <= kFused) return kSumFused<Value>[rows.size() - 1](out, rows.data(), first, count);
  const size_t left = std::bit_floor(rows.size() - 1);
  std::array<float, kCachedFloats> right;
  sum_block(out, rows.first(left), first, count);
  sum_block(right.data(), rows.subspan(left), first, count);
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) out[i] += right[static_cast<size_t>(i)];
}

template <typename Value>
void sum_rows(float* out, std::span<const Value* const> rows, int64_t count) {
  TRIREME_CHECK(!rows.empty() && count >= 0, "[kernels.tree_sum] {} rows of {} elements", rows.size(), count);
  for_rows(count, static_cast<int64_t>(rows.size()), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kCachedFloats) {
      sum_block(out + first, rows, first, std::min(kCachedFloats, end - first));
    }
  });
}

}  // namespace

void tree_sum(float* out, std::span<const float* const> rows, int64_t count) {
  sum_rows(out, rows, count);
}

void tree_sum_bf16(float* out, std::span<const uint16_t* const> rows, int64_t count) {
  sum_rows(out, rows, count);
}

}  // namespace trireme::kernels
