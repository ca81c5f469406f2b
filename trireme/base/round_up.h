#pragma once
#include <cstdint>

namespace trireme {

/// The least multiple of `step` that is not below `count`. `count` is 0 or more, `step` 1 or more.
constexpr int64_t round_up(int64_t count, int64_t step) {
  return (count + step - 1) / step * step;
}

}  // namespace trireme
