#include "trireme/cli/doctor.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

const char* word(Verdict verdict) {
  constexpr const char* kWords[] = {"OK", "WARN", "FAIL"};
  return kWords[static_cast<size_t>(verdict)];
}

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

int doctor(bool json, const Front& front) {
  const int gpus = gpu_count();
  std::vector<Check> checks = check_worker(front.environment, gpus);
  std::ranges::move(check_machine(front.environment, front.runs_root(), gpus), std::back_inserter(checks));
  json ? print_json(checks) : print_table(checks);
  return static_cast<int>(any_fail(checks) ? ExitCode::kEnvironment : ExitCode::kOk);
}

}  // namespace

void add_doctor(CLI::App& app, Front& front) {
  auto json = std::make_shared<bool>(false);
  CLI::App* verb = app.add_subcommand("doctor", "Check this machine and this build, and suggest fixes");
  verb->add_flag("--json", *json, "Print one JSON document");
  verb->footer("Exit code 3 if a check fails.");
  verb->callback([json, &front] { front.action = [json, &front] { return doctor(*json, front); }; });
}

}  // namespace trireme::cli
