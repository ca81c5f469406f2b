#include "trireme/report/cost_table.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/table.h"

namespace trireme::report {
namespace {

using Json = nlohmann::json;

std::string bytes_text(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

const RunCost::State& state_of(const CostRow& row) {
  return row.measured ? row.cost.measured : row.cost.predicted;
}

std::string saved(const CostRow& row, const std::vector<CostRow>& rows) {
  const auto ddp = std::ranges::find(rows, "ddp", &CostRow::policy);
  if (ddp == rows.end()) return "";
  const bool both = row.measured && ddp->measured;
  const auto total = [&](const CostRow& of) {
    return both ? of.cost.measured.total() : of.cost.predicted.total();
  };
  return fmt::format("{:.1f}%",
                     100.0 * (1.0 - static_cast<double>(total(row)) / static_cast<double>(total(*ddp))));
}

/// The share of communication that ran behind computation.
std::string hidden(const RunCost& cost) {
  if (cost.communication_ms <= 0.0) return "-";
  return fmt::format("{:.0f}%", 100.0 * (1.0 - cost.exposed_ms / cost.communication_ms));
}

RunCost::State read_state(const Json& json) {
  return {json.at("parameters"), json.at("gradients"), json.at("optimizer")};
}

/// Median step time after the first steps, from metrics.jsonl.
double median_step_ms(const std::string& path) {
  std::vector<double> values;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) values.push_back(Json::parse(line).at("step_ms"));
  if (values.size() > 4)
    values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 4));
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

std::string cost_table(const std::vector<CostRow>& rows) {
  const auto right = [](const char* title) { return Column{title, Align::kRight}; };
  Table table({{"policy"},
               right("parameters"),
               right("gradients"),
               right("optimizer"),
               right("state"),
               right("predicted"),
               right("saved"),
               right("activations"),
               right("predicted"),
               right("sent/step"),
               right("predicted"),
               right("step ms"),
               right("hidden"),
               right("peak")});
  for (const CostRow& row : rows) {
    const RunCost::State& state = state_of(row);
    const auto if_measured = [&](const std::string& text) { return row.measured ? text : "-"; };
    table.add_row({row.policy, bytes_text(state.parameters), bytes_text(state.gradients),
                   bytes_text(state.optimizer), if_measured(bytes_text(state.total())),
                   bytes_text(row.cost.predicted.total()), saved(row, rows),
                   row.cost.measured_activation_bytes ? bytes_text(*row.cost.measured_activation_bytes) : "-",
                   bytes_text(row.cost.predicted_activation_bytes),
                   if_measured(bytes_text(row.cost.measured_wire_bytes)),
                   bytes_text(row.cost.predicted_wire_bytes), if_measured(fmt::format("{:.1f}", row.step_ms)),
                   if_measured(hidden(row.cost)), if_measured(bytes_text(row.peak_bytes))});
  }
  return table.to_string();
}

CostRow read_cost(const std::string& run_directory, const std::string& policy) {
  const std::string path = run_directory + "/summary.json";
  try {
    const Json json = Json::parse(read_file(path));
    CostRow row{
        .policy = policy, .cost = {}, .measured = true, .step_ms = 0.0, .peak_bytes = json.at("peak_bytes")};
    row.cost.predicted = read_state(json.at("state_bytes").at("predicted"));
    row.cost.measured = read_state(json.at("state_bytes").at("measured"));
    row.cost.predicted_wire_bytes = json.at("wire_bytes_per_step").at("predicted");
    row.cost.measured_wire_bytes = json.at("wire_bytes_per_step").at("measured");
    row.cost.predicted_activation_bytes = json.at("activation_bytes").at("predicted");
    if (const Json& measured = json.at("activation_bytes").at("measured"); !measured.is_null())
      row.cost.measured_activation_bytes = measured.get<int64_t>();
    row.cost.communication_ms = json.at("communication_ms").at("total");
    row.cost.exposed_ms = json.at("communication_ms").at("exposed");
    row.step_ms = median_step_ms(run_directory + "/metrics.jsonl");
    return row;
  } catch (const Json::exception& error) {
    throw DataError("[report.cost] {} is not the summary of a finished run ({}); run it again", path,
                    error.what());
  }
}

}  // namespace trireme::report
