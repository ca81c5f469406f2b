#include "trireme/cli/doctor.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/build_info.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/rates_file.h"
#include "trireme/cli/train_job.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

const char* word(Verdict verdict) {
  constexpr const char* kWords[] = {"OK", "WARN", "FAIL"};
  return kWords[static_cast<size_t>(verdict)];
}

struct DoctorOptions {
  bool json = false;
  std::string probe;  ///< a file; empty: check
  std::optional<int64_t> ranks;
  bool cpu = false;
};

bool any_fail(const std::vector<Check>& checks) {
  return std::ranges::any_of(checks, [](const Check& check) { return check.verdict == Verdict::kFail; });
}

void print_json(const std::vector<Check>& checks) {
  Json rows = Json::array();
  for (const Check& check : checks) {
    rows.push_back(
        {{"name", check.name}, {"verdict", word(check.verdict)}, {"found", check.found}, {"fix", check.fix}});
  }
  const Json document = {{"schema", "trireme.doctor/1"}, {"ok", !any_fail(checks)}, {"checks", rows}};
  fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_table(const std::vector<Check>& checks) {
  report::Table table({{""}, {"check"}, {"found"}});
  for (const Check& check : checks) {
    table.add_row({word(check.verdict), check.name, check.found});
    if (!check.fix.empty()) table.add_row({"", "", "fix: " + check.fix});
  }
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
}

/// Measures into options.probe: on all GPUs, or on so many CPU ranks.
int probe(const DoctorOptions& options, const Front& front) {
  const int gpus = kHasCuda ? gpu_count() : 0;
  const plan::Device device = choose_device(options.cpu ? plan::Device::kCpu : plan::Device::kAuto, gpus);
  const int code = measure_rates(options.probe, device, choose_ranks(options.ranks, device, gpus),
                                 front.environment, front.command);
  if (code == 0)
    fmt::print("the rates of this machine are in {}; 'trireme plan time --probe {}' uses them\n",
               options.probe, options.probe);
  return code;
}

int doctor(const DoctorOptions& options, const Front& front) {
  if (!options.probe.empty()) return probe(options, front);
  const int gpus = gpu_count();
  std::vector<Check> checks = check_worker(front.environment, gpus);
  std::ranges::move(check_machine(front.environment, front.runs_root(), gpus), std::back_inserter(checks));
  options.json ? print_json(checks) : print_table(checks);
  return static_cast<int>(any_fail(checks) ? ExitCode::kEnvironment : ExitCode::kOk);
}

}  // namespace

void add_doctor(CLI::App& app, Front& front) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* verb = app.add_subcommand("doctor", "Check this machine and this build, and suggest fixes");
  CLI::Option* const json = verb->add_flag("--json", options->json, "Print one JSON document");
  CLI::Option* const probe =
      verb->add_option("--probe", options->probe,
                       "Instead, measure in at most two minutes how fast this machine multiplies, attends, "
                       "moves memory and communicates, and write the rates to FILE for 'trireme plan time'")
          ->option_text("FILE")
          ->excludes(json);
  verb->add_option("-n,--ranks", options->ranks,
                   "With --probe, the ranks that are measured at once (default: all GPUs, else 2)")
      ->option_text("RANKS")
      ->needs(probe);
  verb->add_flag("--cpu", options->cpu, "With --probe, measure CPU ranks also where there are GPUs")
      ->needs(probe);
  verb->footer(
      "Exit code 3 if a check fails.\n"
      "Examples:\n"
      "  trireme doctor\n"
      "  trireme doctor --probe rates.json");
  verb->callback([options, &front] { front.action = [options, &front] { return doctor(*options, front); }; });
}

}  // namespace trireme::cli
