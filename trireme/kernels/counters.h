#pragma once
#include <cstdint>
#include <limits>

namespace trireme::kernels {

/// The counters of random numbers that follow each other in memory: runs of `run` that count up, whose first
/// ones are `stride` apart, as the elements have them that a slice of a tensor has. Without `run` one run.
struct Counters {
  int64_t first = 0;
  int64_t run = std::numeric_limits<int64_t>::max(), stride = 0;

  constexpr int64_t of(int64_t i) const { return first + i / run * stride + i % run; }
};

}  // namespace trireme::kernels
