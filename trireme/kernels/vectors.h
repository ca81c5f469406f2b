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

/// From and to any place of a float.
inline Vector load(const float* from) {
  Vector values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}
inline void store(float* to, Vector values) {
  std::memcpy(to, &values, sizeof(values));
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
