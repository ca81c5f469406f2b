#include "trireme/report/recorded_number.h"

#include <limits>
#include <nlohmann/json.hpp>

namespace trireme::report {

std::optional<double> recorded_number(const nlohmann::json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (value == "Infinity") return std::numeric_limits<double>::infinity();
  if (value == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

std::optional<int64_t> recorded_step(const nlohmann::json& line) {
  if (!line.is_object()) return std::nullopt;
  const auto found = line.find("step");
  if (found == line.end() || !found->is_number_integer()) return std::nullopt;
  const auto step = found->get<int64_t>();  // one beyond its range becomes negative
  return step >= 1 ? std::optional(step) : std::nullopt;
}

std::optional<int64_t> step_of_line(std::string_view line) {
  return recorded_step(nlohmann::json::parse(line, nullptr, false));
}

}  // namespace trireme::report
