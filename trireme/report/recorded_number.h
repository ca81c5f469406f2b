#pragma once
// Numbers of metrics.jsonl and summary.json, which JSON has no words for when they are not finite.
#include <nlohmann/json_fwd.hpp>
#include <optional>

namespace trireme::report {

/// A number, or one of the strings "NaN", "Infinity" and "-Infinity"; none for all else.
std::optional<double> recorded_number(const nlohmann::json& value);

}  // namespace trireme::report
