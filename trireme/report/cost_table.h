#pragma once
// The costs of data-parallel policies, side by side.
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/sink.h"

namespace trireme::report {

struct CostRow {
  std::string policy;
  RunCost cost;
  bool measured = false;               ///< else only what is predicted holds
  std::optional<double> step_ms = {};  ///< median without the warm-up; none: too few steps to tell
  int64_t peak_bytes = 0;
};

/// One row a policy, with "-" where nothing was measured, in at most `columns` (Table::to_string); a line
/// below says when steps were too few to tell how long one takes. Bytes are of rank 0 but for "peak", the
/// largest rank's. "saved" compares state bytes with the row "ddp", measured ones where both are; "gathered"
/// is what units in flight hold of whole parameters and gradients, "baseline" what the process took before
/// there was a model, "hidden" the share of communication that overlapped with computation.
std::string cost_table(const std::vector<CostRow>& rows, int64_t columns = 0);

/// The measured row of a finished run. Throws DataError when summary.json is missing or of another version.
CostRow read_cost(const std::string& run_directory, const std::string& policy);

}  // namespace trireme::report
