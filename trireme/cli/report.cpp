// trireme report: one HTML page from what runs have left behind.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/runs.h"
#include "trireme/launch/exits.h"
#include "trireme/report/page.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_record.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ReportOptions {
  std::vector<std::string> runs;
  std::string output, run_dir;
  bool json = false;
};

/// Each run once: 'runs/*' names the newest a second time, as runs/latest.
std::vector<report::RunRecord> records_of(const ReportOptions& options, const Front& front) {
  const std::string root = options.run_dir.empty() ? front.runs_root() : options.run_dir;
  std::vector<report::RunRecord> records;
  for (const std::string& word : options.runs) {
    const std::string path = find_run(word, root, {.what = "manifest", .file = "manifest.json"}).path();
    if (std::ranges::find(records, path, &report::RunRecord::path) == records.end())
      records.push_back(report::read_run(path));
  }
  return records;
}

void write_page(const std::string& path, const std::string& page, bool chosen) {
  try {
    write_file_atomic(path, page);
  } catch (const EnvironmentError& error) {
    if (chosen) throw;
    throw EnvironmentError("{}; write the page elsewhere with --output FILE", error.what());
  }
}

template <typename Value>
Json or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json();
}

Json value_of(const std::optional<report::AtStep>& at) {
  return at ? Json(at->value) : Json();
}

Json figures_json(const report::RunRecord& run) {
  const report::RunFigures figures = report::figures_of(run);
  const auto& range = figures.tokens_range;
  return {{"run", run.path},
          {"name", run.name},
          {"state", report::state_name(report::state_of_run(run))},
          {"exit_code", or_null(run.last_attempt().exit_code)},
          {"attempts", run.attempts.size()},
          {"steps", figures.steps},
          {"loss", or_null(figures.loss)},
          {"val_loss", value_of(figures.val_loss)},
          {"best_val_loss", value_of(figures.best_val_loss)},
          {"val_top1", value_of(figures.val_top1)},
          {"val_top5", value_of(figures.val_top5)},
          {"tokens_per_s", or_null(figures.tokens_per_s)},
          {"tokens_per_s_range", range ? Json{range->low, range->high} : Json()},
          {"step_ms", or_null(figures.step_ms)},
          {"step_ms_p95", or_null(figures.step_ms_p95)},
          {"communication_ms", or_null(figures.communication_ms)},
          {"exposed_ms", or_null(figures.exposed_ms)},
          {"communication_share", or_null(figures.exposed_share)},
          {"peak_bytes", figures.peak_bytes},
          {"weights_digest", figures.weights_digest},
          {"damaged_lines", run.metrics.damaged_lines},
          {"problems", run.problems}};
}

int report_runs(const ReportOptions& options, const Front& front) {
  check_page_path(options.output);
  const std::vector<report::RunRecord> runs = records_of(options, front);
  const std::string path = options.output.empty() ? runs.front().path + "/report.html" : options.output;
  const std::string page = report::run_page(runs, {.meaning = launch::meaning});
  write_page(path, page, !options.output.empty());
  if (options.json) {
    Json json = {
        {"schema", "trireme.report/1"}, {"page", path}, {"bytes", page.size()}, {"runs", Json::array()}};
    for (const report::RunRecord& run : runs) json["runs"].push_back(figures_json(run));
    fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
    return 0;
  }
  for (const report::RunRecord& run : runs) {
    for (const std::string& problem : run.problems)
      log_warning("{}: {}", report::as_typed(run.path), problem);
  }
  fmt::print("report  {} ({})\n", report::as_typed(path), format_bytes(static_cast<double>(page.size())));
  return 0;
}

}  // namespace

void add_report(CLI::App& app, Front& front) {
  auto options = std::make_shared<ReportOptions>();
  CLI::App* verb = app.add_subcommand("report", "Write an HTML page about a run, or comparing several");
  verb->add_option("RUN", options->runs, "Run directory, name of a run, or 'latest'; several are compared")
      ->required()
      ->option_text("...");
  verb->add_option("-o,--output", options->output,
                   "Path of the page (default: report.html in the directory of the first run)")
      ->option_text("FILE");
  verb->add_option("--run-dir", options->run_dir, "Parent of the run directories")->option_text("DIR");
  verb->add_flag("--json", options->json,
                 "Write the page, and also print the figures of the runs as one JSON document");
  verb->footer(
      "Works for runs in any state: finished, interrupted, failed or running. The page needs no network and "
      "no\n"
      "scripts, and includes pictures/*.svg and *.png of the run.\n"
      "Examples:\n"
      "  trireme report latest\n"
      "  trireme report runs/ddp-* runs/fsdp-* -o compared.html");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return report_runs(*options, front); }; });
}

}  // namespace trireme::cli
