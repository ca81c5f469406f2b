#pragma once
// How a run was laid out, worked out again from its config by the code that planned it.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/plan/memory.h"
#include "trireme/report/run_record.h"

namespace trireme::report {

struct RunLayout {
  std::vector<std::pair<std::string, std::string>> rows;  ///< name, and value in words
  std::optional<plan::RankBytes> predicted;               ///< memory of the rank that needs most
  double flops_per_token = 0.0;                           ///< 0: not known
  std::string problem;                                    ///< why parts are missing; empty: none are
};

/// Never throws for what a config says: a run of another version may have one that this one does not read.
RunLayout layout_of(const RunRecord& run);

}  // namespace trireme::report
