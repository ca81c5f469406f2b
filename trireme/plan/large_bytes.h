#pragma once
// Bytes of models of any size: the largest that a config describes need more than 64 bits can count.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace trireme::plan {

inline int64_t at_most_62_bits(double bytes) {
  return static_cast<int64_t>(std::min(bytes, 0x1.0p62));
}

/// The largest number where the sum is beyond it.
inline int64_t bounded_sum(std::initializer_list<int64_t> terms) {
  int64_t sum = 0;
  for (const int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

/// The largest number where the product is beyond it.
inline int64_t bounded_product(int64_t count, int64_t bytes) {
  int64_t product = 0;
  return __builtin_mul_overflow(count, bytes, &product) ? std::numeric_limits<int64_t>::max() : product;
}

}  // namespace trireme::plan
