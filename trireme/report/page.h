#pragma once
// One HTML page from the records of runs: of one run all that it has left, of several their curves over each
// other and what differs.
#include <string>
#include <string_view>
#include <vector>

#include "trireme/report/run_record.h"

namespace trireme::report {

struct PageOptions {
  /// The meaning of an exit code, " (out of memory)"; empty where it has none of its own.
  std::string_view (*meaning)(int code);
};

/// A document that needs nothing but itself: no script, nothing from a network. `runs` must not be empty.
std::string run_page(const std::vector<RunRecord>& runs, const PageOptions& options);

}  // namespace trireme::report
