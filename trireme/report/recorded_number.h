#pragma once
// Numbers of metrics.jsonl and summary.json, which JSON has no words for when they are not finite.
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>

namespace trireme::report {

/// A number, or one of the strings "NaN", "Infinity" and "-Infinity"; none for all else.
std::optional<double> recorded_number(const nlohmann::json& value);

/// The step that a line of metrics.jsonl is about; none: it is not a JSON object, or its step is not a whole
/// number of at least 1.
std::optional<int64_t> recorded_step(const nlohmann::json& line);
std::optional<int64_t> step_of_line(std::string_view line);

}  // namespace trireme::report
