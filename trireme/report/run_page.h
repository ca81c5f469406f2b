#pragma once
// The contents of a page about one run, or about several.
#include <string>
#include <vector>

#include "trireme/report/html.h"
#include "trireme/report/page.h"

namespace trireme::report {

Markup draw_run(const RunRecord& run, const PageOptions& options);
Markup draw_comparison(const std::vector<RunRecord>& runs, const PageOptions& options);

/// Short names that tell runs apart: their own, or where these are not different their folders'.
std::vector<std::string> names_of(const std::vector<RunRecord>& runs);

}  // namespace trireme::report
