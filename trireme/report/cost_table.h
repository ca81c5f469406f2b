#pragma once
// What data-parallel policies cost, side by side.
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/sink.h"

namespace trireme::report {

struct CostRow {
  std::string policy;
  RunCost cost;
  bool measured = false;  ///< else only what is predicted holds
  double step_ms = 0.0;
  int64_t peak_bytes = 0;
};

/// One row a policy; "saved" compares state bytes with the row "ddp", measured ones where both are. Bytes are
/// of rank 0; "hidden" is the share of communication that ran behind computation.
std::string cost_table(const std::vector<CostRow>& rows);

/// The measured row of a finished run. Throws DataError when summary.json is missing or of another version.
CostRow read_cost(const std::string& run_directory, const std::string& policy);

}  // namespace trireme::report
