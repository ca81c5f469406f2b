#include "trireme/report/step_times.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme::report {

std::vector<double> steady_step_ms(const std::string& run_directory) {
  const std::string path = run_directory + "/metrics.jsonl";
  std::vector<double> values;
  std::ifstream file(path);
  try {
    for (std::string line; std::getline(file, line);)
      values.push_back(nlohmann::json::parse(line).at("step_ms"));
  } catch (const nlohmann::json::exception& error) {
    throw DataError("[report.steps] {} does not have the steps of a run ({}); run it again", path,
                    error.what());
  }
  if (values.size() < kLeastSteps) return {};
  const size_t warm_up = std::max<size_t>(2, values.size() / 4);
  values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(warm_up));
  return values;
}

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  if (values.size() % 2 == 1) return *middle;
  return 0.5 * (*middle + *std::max_element(values.begin(), middle));
}

std::optional<Interval> median_interval(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  std::ranges::sort(values);
  const auto count = static_cast<double>(values.size());
  constexpr double kNormal95 = 1.959964;
  const double reach = kNormal95 * std::sqrt(count) / 2.0;
  const auto low = static_cast<int64_t>(std::floor(count / 2.0 - reach));  // counted from 1
  const auto high = static_cast<int64_t>(std::ceil(count / 2.0 + reach)) + 1;
  const auto value = [&](int64_t rank) {
    return values[static_cast<size_t>(std::clamp<int64_t>(rank, 1, std::ssize(values)) - 1)];
  };
  return Interval{value(low), value(high)};
}

}  // namespace trireme::report
