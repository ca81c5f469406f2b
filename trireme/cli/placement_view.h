#pragma once
// The parameters that a rank holds, for people and for scripts.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trireme/cli/run_plan.h"
#include "trireme/plan/held_parameters.h"

namespace trireme::cli {

/// A table under `title`, in at most `columns`, with the sums in its last row.
std::string placement_table(const std::string& title, const std::vector<plan::HeldParameter>& params,
                            int64_t columns);
/// {"parameters": [...], "totals": {...}}.
nlohmann::ordered_json placement_json(const std::vector<plan::HeldParameter>& params);

/// The units of a stage of a pipeline: "0: root to transformer.h.1".
std::string stage_text(const RunPlan& run, int64_t stage);

}  // namespace trireme::cli
