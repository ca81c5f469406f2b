#include "trireme/report/cost_table.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/step_times.h"
#include "trireme/report/table.h"

namespace trireme::report {
namespace {

using Json = nlohmann::json;

const std::string kNothing = "-";

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

/// The share of communication that overlapped with computation.
std::string hidden(const RunCost& cost) {
  if (cost.communication_ms.value_or(0.0) <= 0.0 || !cost.exposed_ms) return kNothing;
  return fmt::format("{:.0f}%", 100.0 * (1.0 - *cost.exposed_ms / *cost.communication_ms));
}

RunCost::State read_state(const Json& json) {
  return {json.at("parameters"), json.at("gradients"), json.at("optimizer")};
}

std::optional<double> read_number(const Json& json) {
  return json.is_number() ? std::optional(json.get<double>()) : std::nullopt;
}

std::vector<Column> titles() {
  std::vector<Column> titles = {{"policy"}};
  for (const char* title : {"parameters", "gradients", "optimizer", "state", "predicted state", "saved",
                            "predicted gathered", "activations", "predicted activations", "baseline", "peak",
                            "predicted peak", "sent/step", "predicted sent/step", "step ms", "hidden"}) {
    titles.push_back({title, Align::kRight});
  }
  return titles;
}

std::vector<std::string> cells(const CostRow& row, const std::vector<CostRow>& rows) {
  const RunCost& cost = row.cost;
  const RunCost::State& state = state_of(row);
  const auto if_measured = [&](const std::string& text) { return row.measured ? text : kNothing; };
  return {row.policy,
          bytes_text(state.parameters),
          bytes_text(state.gradients),
          bytes_text(state.optimizer),
          if_measured(bytes_text(state.total())),
          bytes_text(cost.predicted.total()),
          saved(row, rows),
          bytes_text(cost.predicted_gathered_bytes),
          cost.measured_activation_bytes ? bytes_text(*cost.measured_activation_bytes) : kNothing,
          bytes_text(cost.predicted_activation_bytes),
          if_measured(bytes_text(cost.baseline_bytes)),
          if_measured(bytes_text(row.peak_bytes)),
          bytes_text(cost.predicted_peak_bytes),
          if_measured(bytes_text(cost.measured_wire_bytes)),
          cost.predicted_wire_bytes ? bytes_text(*cost.predicted_wire_bytes) : kNothing,
          row.step_ms ? fmt::format("{:.1f}", *row.step_ms) : kNothing,
          if_measured(hidden(cost))};
}

}  // namespace

std::string cost_table(const std::vector<CostRow>& rows, int64_t columns) {
  Table table(titles());
  for (const CostRow& row : rows) table.add_row(cells(row, rows));
  std::string text = table.to_string(columns);
  if (std::ranges::any_of(rows, [](const CostRow& row) { return row.measured && !row.step_ms; })) {
    text += fmt::format("step ms: needs runs of at least {} steps; raise train.steps\n", kLeastSteps);
  }
  return text;
}

CostRow read_cost(const std::string& run_directory, const std::string& policy) {
  const std::string path = run_directory + "/summary.json";
  try {
    const Json json = Json::parse(read_file(path));
    CostRow row{.policy = policy, .cost = {}, .measured = true, .peak_bytes = json.at("peak_bytes")};
    row.cost.predicted = read_state(json.at("state_bytes").at("predicted"));
    row.cost.measured = read_state(json.at("state_bytes").at("measured"));
    const Json& sent = json.at("wire_bytes_per_step").at("predicted");
    row.cost.predicted_wire_bytes = sent.is_null() ? std::nullopt : std::optional(sent.get<int64_t>());
    row.cost.measured_wire_bytes = json.at("wire_bytes_per_step").at("measured");
    row.cost.predicted_activation_bytes = json.at("activation_bytes").at("predicted");
    if (const Json& measured = json.at("activation_bytes").at("measured"); !measured.is_null())
      row.cost.measured_activation_bytes = measured.get<int64_t>();
    row.cost.predicted_gathered_bytes = json.at("gathered_bytes").at("predicted");
    row.cost.baseline_bytes = json.at("baseline_bytes");
    row.cost.predicted_peak_bytes = json.at("predicted_peak_bytes");
    row.cost.communication_ms = read_number(json.at("communication_ms").at("total"));
    row.cost.exposed_ms = read_number(json.at("communication_ms").at("exposed"));
    row.step_ms = median(steady_step_ms(run_directory));
    return row;
  } catch (const Json::exception& error) {
    throw DataError("[report.cost] {} is not the summary of a finished run ({}); run it again", path,
                    error.what());
  }
}

}  // namespace trireme::report
