// trireme sweep: one run for each combination of values, one after the other, and a page that compares them.
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/file.h"
#include "trireme/base/streams.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/runs.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/weights.h"
#include "trireme/launch/exits.h"
#include "trireme/report/page.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_record.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct SweepOptions {
  TrainJob job;
  std::vector<std::string> grid;  ///< "optim.lr=1e-3,3e-3"
  std::string output;
  bool json = false;
};

/// A key and the values that it takes.
struct GridKey {
  std::string name;
  std::vector<std::string> values;
};

/// A value for each key.
using Combination = std::vector<std::string>;

struct SweptRun {
  Combination values;
  int code = 0;    ///< exit code of the training
  int signal = 0;  ///< that asked to stop, perhaps when the training was done; 0: none
  std::string directory;
  std::optional<report::RunFigures> figures = {};  ///< none: the run has left no records
};

GridKey grid_key_of(const std::string& word) {
  const size_t equals = word.find('=');
  GridKey key{.name = word.substr(0, equals), .values = {}};
  if (equals != std::string::npos) {
    const std::string values = word.substr(equals + 1);
    key.values = split(values, values.find(';') == std::string::npos ? ',' : ';');
  }
  const auto is_empty = [](const std::string& value) { return value.empty(); };
  if (key.name.empty() || key.values.empty() || std::ranges::any_of(key.values, is_empty))
    throw UsageError(fmt::format("[cli.sweep] --grid {} is no list of values", word),
                     "write --grid optim.lr=1e-3,3e-3, and semicolons where values have commas");
  return key;
}

std::vector<GridKey> grid_of(const std::vector<std::string>& words) {
  std::vector<GridKey> grid;
  for (const std::string& word : words) {
    grid.push_back(grid_key_of(word));
    const std::string& key = grid.back().name;
    if (std::ranges::count(grid, key, &GridKey::name) > 1)
      throw UsageError(fmt::format("[cli.sweep] --grid names {} twice", key), "give all its values at once");
  }
  return grid;
}

/// All combinations; the last key varies fastest.
std::vector<Combination> combinations_of(const std::vector<GridKey>& grid) {
  std::vector<Combination> all = {{}};
  for (const GridKey& key : grid) {
    std::vector<Combination> longer;
    for (const Combination& begun : all) {
      for (const std::string& value : key.values) {
        longer.push_back(begun);
        longer.back().push_back(value);
      }
    }
    all = std::move(longer);
  }
  return all;
}

/// "optim.lr=1e-3 model.d_model=64".
std::string text_of(const std::vector<GridKey>& grid, const Combination& values) {
  std::vector<std::string> words;
  for (size_t i = 0; i < values.size(); ++i) words.push_back(grid[i].name + "=" + values[i]);
  return join(words, " ");
}

/// The job of combination `index`, under the config's name and a number.
TrainJob job_of(const SweepOptions& options, const Front& front, const std::vector<GridKey>& grid,
                const Combination& values, const std::string& name) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  job.overrides.push_back("name=" + name);
  for (size_t i = 0; i < values.size(); ++i) job.overrides.push_back(grid[i].name + "=" + values[i]);
  job.quiet = job.silent = true;
  return job;
}

/// A failed run is named, and the others still have their turn.
SweptRun run_one(const TrainJob& job, const std::string& text, const Combination& values, Front& front) {
  write_stderr(fmt::format("sweep: {}\n", text));
  SweptRun run{.values = values, .code = 0, .directory = {}};
  try {
    const FinishedJob finished = run_train_job(job, front);
    run.code = finished.code;
    run.signal = finished.signal;
    run.directory = finished.run_directory;
    run.figures = report::figures_of(report::read_run(run.directory));
  } catch (const Error& error) {
    write_stderr(fmt::format("sweep: {} could not run: {}\n", text, error.what()));
    run.code = static_cast<int>(error.exit_code());
  }
  if (run.code != 0 && !run.directory.empty()) {
    write_stderr(fmt::format("sweep: {} ended with code {}{}; its logs are in {}/logs\n", text, run.code,
                             launch::meaning(run.code), run.directory));
  }
  return run;
}

/// By what runs are compared: the best validation loss, else the last loss.
std::optional<double> score_of(const SweptRun& run) {
  if (!run.figures || run.code != 0) return std::nullopt;
  if (run.figures->best_val_loss) return run.figures->best_val_loss->value;
  return run.figures->loss;
}

/// The run with the smallest score; none: no run has ended well.
const SweptRun* best_of(const std::vector<SweptRun>& runs) {
  const SweptRun* best = nullptr;
  for (const SweptRun& run : runs) {
    const auto score = score_of(run);
    if (score && std::isfinite(*score) && (best == nullptr || *score < *score_of(*best))) best = &run;
  }
  return best;
}

std::string number_or_dash(const std::optional<double>& number) {
  return number ? fmt::format("{:.4f}", *number) : "-";
}

std::optional<double> value_at(const std::optional<report::AtStep>& at) {
  return at ? std::optional(at->value) : std::nullopt;
}

std::string table_of(const std::vector<GridKey>& grid, const std::vector<SweptRun>& runs) {
  std::vector<report::Column> columns;
  for (const GridKey& key : grid) columns.push_back({key.name});
  for (const char* const title : {"loss", "best val", "tokens/s", "run"}) columns.push_back({title});
  report::Table table(std::move(columns));
  const SweptRun* const best = best_of(runs);
  for (const SweptRun& run : runs) {
    std::vector<std::string> cells = run.values;
    const report::RunFigures figures = run.figures.value_or(report::RunFigures());
    cells.push_back(number_or_dash(figures.loss));
    cells.push_back(number_or_dash(value_at(figures.best_val_loss)));
    cells.push_back(figures.tokens_per_s ? format_count(*figures.tokens_per_s) : "-");
    const std::string where = run.directory.empty() ? "" : report::as_typed(run.directory);
    const std::string failed =
        run.code == 0 ? "" : fmt::format("failed with code {}{}  ", run.code, launch::meaning(run.code));
    cells.push_back(failed + where + (&run == best ? "  (best)" : ""));
    table.add_row(std::move(cells));
  }
  return table.to_string(terminal_columns(STDOUT_FILENO));
}

std::string json_of(const std::vector<GridKey>& grid, const std::vector<SweptRun>& runs,
                    const std::string& page) {
  const auto or_null = [](const std::optional<double>& number) { return number ? Json(*number) : Json(); };
  const SweptRun* const best = best_of(runs);
  Json json = {{"schema", "trireme.sweep/1"}, {"page", page}, {"runs", Json::array()}};
  for (const SweptRun& run : runs) {
    Json values;
    for (size_t i = 0; i < run.values.size(); ++i) values[grid[i].name] = run.values[i];
    const report::RunFigures figures = run.figures.value_or(report::RunFigures());
    json["runs"].push_back({{"values", values},
                            {"exit_code", run.code},
                            {"run", run.directory},
                            {"loss", or_null(figures.loss)},
                            {"best_val_loss", or_null(value_at(figures.best_val_loss))},
                            {"tokens_per_s", or_null(figures.tokens_per_s)},
                            {"best", &run == best}});
  }
  return json.dump(2) + "\n";
}

/// Returns the path of the page; empty: there is no run to show.
std::string write_page(const SweepOptions& options, const std::vector<SweptRun>& runs) {
  std::vector<report::RunRecord> records;
  for (const SweptRun& run : runs) {
    if (run.figures) records.push_back(report::read_run(run.directory));
  }
  if (records.empty()) return {};
  const std::string path = options.output.empty() ? records.front().path + "/report.html" : options.output;
  write_file_atomic(path, report::run_page(records, {.meaning = launch::meaning}));
  return path;
}

bool was_stopped(int code) {
  return code == static_cast<int>(ExitCode::kPreempted) || code == 128 + SIGINT || code == 128 + SIGTERM;
}

int sweep(const SweepOptions& options, Front& front) {
  const std::vector<GridKey> grid = grid_of(options.grid);
  const std::vector<Combination> combinations = combinations_of(grid);
  check_page_path(options.output);
  TrainJob plain = options.job;
  plain.overrides = front.overrides;
  const std::string name = prepare_train_job(plain, front).config.config.name;
  std::vector<TrainJob> jobs;
  for (const Combination& values : combinations) {
    jobs.push_back(job_of(options, front, grid, values, fmt::format("{}-{}", name, jobs.size() + 1)));
    check_weights(std::nullopt, prepare_train_job(jobs.back(), front).config.config);
  }
  worker_path();  // throws when there is none, before hours of other runs
  std::vector<SweptRun> runs;
  for (size_t i = 0; i < jobs.size(); ++i) {
    runs.push_back(run_one(jobs[i], text_of(grid, combinations[i]), combinations[i], front));
    if (runs.back().signal != 0 || was_stopped(runs.back().code)) break;
  }
  const std::string page = write_page(options, runs);
  fmt::print("{}", options.json ? json_of(grid, runs, page) : table_of(grid, runs));
  if (!options.json && !page.empty()) fmt::print("page  {}\n", report::as_typed(page));
  const auto failed = std::ranges::find_if(runs, [](const SweptRun& run) { return run.code != 0; });
  if (failed != runs.end()) return failed->code;
  return runs.back().signal == 0 ? 0 : 128 + runs.back().signal;
}

}  // namespace

void add_sweep(CLI::App& app, Front& front) {
  auto options = std::make_shared<SweepOptions>();
  CLI::App* verb =
      app.add_subcommand("sweep", "Train once for each combination of values, and compare the runs");
  add_config_file(*verb, options->job.config);
  verb->add_option("--grid", options->grid,
                   "A key and its values, separated by commas (or by semicolons where values have commas); "
                   "several make a grid")
      ->required()
      ->allow_extra_args(false)
      ->option_text("KEY=V1,V2,...");
  verb->add_option("-n,--ranks", options->job.ranks, "Ranks of each run (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--run-dir", options->job.run_dir,
                   "Parent of run directories (default: $TRIREME_RUN_DIR, else ./runs)")
      ->option_text("DIR");
  verb->add_option("-o,--output", options->output,
                   "Path of the page that compares them (default: report.html in the directory of the first)")
      ->option_text("FILE");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value and holds for all runs. All combinations are "
      "checked "
      "before the first run starts. A run that fails is named, and the others still run; the exit code is "
      "that "
      "of the first that failed. Ctrl-C ends the sweep.\n"
      "Examples:\n"
      "  trireme sweep configs/quickstart.yaml --grid optim.lr=1e-3,3e-3,1e-2\n"
      "  trireme sweep configs/quickstart.yaml --grid optim.lr=1e-3,3e-3 --grid train.global_batch=8,16 "
      "--json");
  verb->callback([options, &front] { front.action = [options, &front] { return sweep(*options, front); }; });
}

}  // namespace trireme::cli
