#pragma once
// Whether runs may be compared: they trained the same thing, came to the same result, and their clocks and
// records hold together. Nothing is said about times before that.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/bench/sample.h"
#include "trireme/bench/target.h"

namespace trireme::bench {

struct Check {
  std::string what;  ///< "the arms trained the same workload"
  bool holds = true;
  std::string detail;  ///< what was seen
};

/// The runs of a target, and all that they are held against.
struct Evidence {
  const std::vector<Arm>* arms = nullptr;
  const std::vector<Sample>* samples = nullptr;
  const Sample* twin = nullptr;  ///< a run of the reference's workload on one rank; none: there is none
  std::string why_no_twin = {};  ///< said where there is none
  /// Short runs of all arms with train.deterministic=true, by arm; null or empty: there are none.
  const std::vector<Sample>* proofs = nullptr;
  int64_t steps = 0;  ///< that every run was to make, warm-up included
};

/// All checks, those that failed among them. Where a run has not ended well, only that is said.
std::vector<Check> verify(const Evidence& evidence);

bool all_hold(const std::vector<Check>& checks);

}  // namespace trireme::bench
