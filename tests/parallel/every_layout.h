#pragma once
// Layouts of all policies, for what none of them may change.
#include <vector>

#include "tests/parallel/layouts.h"

namespace trireme::test {

inline std::vector<Layout> every_layout(int64_t ranks) {
  std::vector<Layout> all = layouts(ranks);
  all.push_back({"zero3"});
  return all;
}

}  // namespace trireme::test
