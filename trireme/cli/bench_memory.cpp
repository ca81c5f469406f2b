#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/cli/bench_runs.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const RunCost::State& bytes) {
  return {{"parameters", bytes.parameters},
          {"gradients", bytes.gradients},
          {"optimizer", bytes.optimizer},
          {"total", bytes.total()}};
}

template <typename Number>
Json number(const std::optional<Number>& value) {
  return value ? Json(*value) : Json();
}

Json to_json(const report::CostRow& row) {
  const RunCost& cost = row.cost;
  return {{"policy", row.policy},
          {"state_bytes", {{"measured", to_json(cost.measured)}, {"predicted", to_json(cost.predicted)}}},
          {"wire_bytes_per_step",
           {{"measured", cost.measured_wire_bytes}, {"predicted", number(cost.predicted_wire_bytes)}}},
          {"gathered_bytes_predicted", cost.predicted_gathered_bytes},
          {"activation_bytes_predicted", cost.predicted_activation_bytes},
          {"activation_bytes_measured", number(cost.measured_activation_bytes)},
          {"baseline_bytes", cost.baseline_bytes},
          {"step_ms", number(row.step_ms)},
          {"peak_bytes", row.peak_bytes},
          {"peak_bytes_predicted", cost.predicted_peak_bytes}};
}

int bench_memory(const BenchRuns& options, Front& front) {
  std::vector<report::CostRow> rows;
  for (const plan::Policy& policy : policies_of(options)) {
    const BenchRun run{.label = policy.label(), .overrides = overrides_of(policy)};
    const BenchResult result = train_once(run, options, front);
    if (result.code != 0) return result.code;
    rows.push_back(report::read_cost(
        result.run_directory, policy.sharding == plan::Sharding::kFullShard ? "fsdp" : policy.label()));
  }
  if (!options.json) {
    fmt::print("{}", report::cost_table(rows, terminal_columns(STDOUT_FILENO)));
    return 0;
  }
  Json document = {{"schema", "trireme.bench_memory/2"}, {"command", front.command}, {"rows", Json::array()}};
  for (const report::CostRow& row : rows) document["rows"].push_back(to_json(row));
  fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace

void add_bench_memory(CLI::App& bench, Front& front) {
  auto options = std::make_shared<BenchRuns>();
  CLI::App* memory = bench.add_subcommand("memory",
                                          "Measure the memory and traffic of each data-parallel policy "
                                          "beside the predictions, each in its own ranks");
  add_options(*memory, *options);
  memory->footer(
      "Any config key can be given as --section.key=value. docs/performance.md explains the columns.\n"
      "Example:\n"
      "  trireme bench memory configs/quickstart.yaml -n 4 --train.steps=20");
  memory->callback(
      [options, &front] { front.action = [options, &front] { return bench_memory(*options, front); }; });
}

}  // namespace trireme::cli
