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

}  // namespace trireme::report
