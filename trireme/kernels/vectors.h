#pragma once
// Vectors of floats as wide as the processor that a kernel is compiled for. Only for CPU kernels, which are
// compiled with TRIREME_CPU_ARCH.
#include <cstdint>
#include <cstring>
#include <vector>

#include "trireme/base/round_up.h"

namespace trireme::kernels {

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif
using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

/// Loads from any address of a float, and stores to any.
inline Vector load(const float* from) {
  Vector values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}
inline void store(float* to, Vector values) {
  std::memcpy(to, &values, sizeof(values));
}

/// A tile of a product, in registers: sums (kRows, kVectors) += A B, where a(row, step) is an element of A,
/// and rows of B, kVectors vectors each, lie b_stride floats apart. As BLIS's micro-kernel (Van Zee, van de
/// Geijn 2015): loops over the tile are unrolled, so that it stays in registers.
template <int64_t kRows, int kVectors, typename Left>
[[gnu::always_inline]] inline void add_product(Vector (&sums)[kRows][kVectors], const Left& a, const float* b,
                                               int64_t b_stride, int64_t inner) {
  for (int64_t step = 0; step < inner; ++step, b += b_stride) {
    Vector values[kVectors];
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) values[vector] = load(b + vector * kLanes);
#pragma GCC unroll 12
    for (int64_t row = 0; row < kRows; ++row) {
      const float factor = a(row, step);
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] += factor * values[vector];
    }
  }
}

/// Memory for rows that begin at whole vectors, zeros at first.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : vectors_(static_cast<size_t>(round_up(floats, kLanes) / kLanes)) {}
  float* data() { return reinterpret_cast<float*>(vectors_.data()); }

 private:
  std::vector<Vector> vectors_;
};

}  // namespace trireme::kernels
