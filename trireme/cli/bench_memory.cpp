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
  const std::vector<plan::Policy> policies = policies_of(options);
  std::vector<BenchRun> runs;
  for (const plan::Policy& policy : policies)
    runs.push_back({.label = policy.label(), .overrides = overrides_of(policy)});
  check_runs(runs, options, front);
  std::vector<report::CostRow> rows;
  int code = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    const BenchResult result = train_once(runs[i], options, front);
    if (result.code == 0) {
      const bool fsdp = policies[i].sharding == plan::Sharding::kFullShard;
      rows.push_back(report::read_cost(result.run_directory, fsdp ? "fsdp" : policies[i].label()));
      continue;
    }
    code = result.code;
    if (code != static_cast<int>(ExitCode::kOutOfMemory)) break;  // another policy may need less
  }
  if (rows.empty()) return code;
  if (!options.json) {
    fmt::print("{}", report::cost_table(rows, terminal_columns(STDOUT_FILENO)));
    return code;
  }
  Json document = {{"schema", "trireme.bench_memory/2"}, {"command", front.command}, {"rows", Json::array()}};
  for (const report::CostRow& row : rows) document["rows"].push_back(to_json(row));
  fmt::print("{}\n", document.dump(2));
  return code;
}

}  // namespace

void add_bench_memory(CLI::App& bench, Front& front) {
  auto options = std::make_shared<BenchRuns>();
  CLI::App* memory = bench.add_subcommand("memory",
                                          "Measure the memory and traffic of each data-parallel policy "
                                          "beside the predictions, each in its own ranks");
  add_options(*memory, *options);
  memory->footer(
      "Every policy is checked before the first one runs. If a run fails, the rows that were measured are\n"
      "printed, and the exit code is that of the failure; after one that does not fit the others still run.\n"
      "Any config key can be given as --section.key=value. docs/performance.md explains the columns.\n"
      "Example:\n"
      "  trireme bench memory configs/quickstart.yaml -n 4");
  memory->callback(
      [options, &front] { front.action = [options, &front] { return bench_memory(*options, front); }; });
}

}  // namespace trireme::cli
