#pragma once
// Row loops over the intra-op thread pool, cut the same way whatever the number of threads, so that sums
// which are collected per cut give the same bits on any machine.
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace trireme::kernels {

/// Elements that one task should at least touch to be worth a thread.
inline constexpr int64_t kGrain = 16384;

/// body(first, last) over rows of `width` elements each.
template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), body);
}

/// Fixed cuts for deterministic partial sums.
inline constexpr int64_t kCuts = 64;

/// body(cut, first, last) for kCuts equal ranges of `rows`; ranges may be empty.
template <typename Body>
void for_cuts(int64_t rows, const Body& body) {
  const int64_t step = (rows + kCuts - 1) / kCuts;
  at::parallel_for(0, kCuts, 1, [&](int64_t first, int64_t last) {
    for (int64_t cut = first; cut < last; ++cut) {
      body(cut, std::min(cut * step, rows), std::min((cut + 1) * step, rows));
    }
  });
}

}  // namespace trireme::kernels
