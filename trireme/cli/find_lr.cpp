// trireme find-lr: a short run at rising learning rates, and where its loss falls fastest.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/runs.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/weights.h"
#include "trireme/report/lr_range.h"
#include "trireme/report/run_record.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The folder below the parent of run directories, so that 'latest' and --resume do not find these runs.
constexpr const char* kRangeTests = "find_lr";

struct FindLrOptions {
  TrainJob job;
  double least = 1e-7, most = 1.0;
  int64_t steps = 100;
  std::string output;
  bool json = false;
};

void check(const FindLrOptions& options) {
  constexpr int64_t kFewest = 20;
  if (!std::isfinite(options.least) || !std::isfinite(options.most) || options.least <= 0.0 ||
      options.most <= options.least)
    throw UsageError(
        fmt::format("[cli.find_lr] --min {} and --max {} are no range", options.least, options.most),
        "give rates above 0, the larger one as --max: --min 1e-7 --max 1");
  if (options.steps < kFewest)
    throw UsageError(
        fmt::format("[cli.find_lr] --steps {} are too few to see where a loss falls", options.steps),
        fmt::format("give {} or more", kFewest));
  check_page_path(options.output);
}

/// The job of steps alone: whatever a run saves, validates and stops at would take its time or end it.
TrainJob job_of(const FindLrOptions& options, const Front& front) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  settle_weights_of(job, front);
  for (const char* const key :
       {"optim.schedule=range", "optim.warmup_steps=0", "optim.step_every=0", "optim.step_factor=0.1",
        "train.epochs=0", "train.fast_dev_run=0", "train.early_stop=0", "train.early_stop_min_delta=0",
        "train.monitor=", "train.val_batches=0", "train.sample_tokens=0", "train.profile_steps=0",
        "train.log_every=1", "checkpoint.every=0", "checkpoint.best=false", "checkpoint.final_weights=false"})
    job.overrides.emplace_back(key);
  job.overrides.push_back(fmt::format("optim.min_lr={}", options.least));
  job.overrides.push_back(fmt::format("optim.lr={}", options.most));
  job.overrides.push_back(fmt::format("train.steps={}", options.steps));
  job.run_dir = runs_root(options.job, front) + "/" + kRangeTests;
  job.quiet = job.silent = true;
  return job;
}

/// The rate of the step behind the last one of `losses`.
double next_rate(const FindLrOptions& options, const report::Curve& losses) {
  const double factor = std::pow(options.most / options.least, 1.0 / static_cast<double>(options.steps - 1));
  return losses.empty() ? options.least : losses.x.back() * factor;
}

std::string or_nowhere(const std::optional<double>& rate) {
  return rate ? fmt::format("{:.2g}", *rate) : "nowhere";
}

void print(const FindLrOptions& options, const report::LrRange& range, const std::string& run,
           const std::string& page) {
  if (options.json) {
    const auto or_null = [](const std::optional<double>& rate) { return rate ? Json(*rate) : Json(); };
    Json rates = Json::array(), losses = Json::array();
    for (size_t i = 0; i < range.loss.size(); ++i) {
      rates.push_back(range.loss.x[i]);
      losses.push_back(std::isfinite(range.loss.y[i]) ? Json(range.loss.y[i]) : Json());
    }
    fmt::print("{}\n", Json{{"schema", "trireme.find-lr/1"},
                            {"run", run},
                            {"page", page},
                            {"steepest", or_null(range.steepest)},
                            {"lowest", or_null(range.lowest)},
                            {"diverged", or_null(range.diverged)},
                            {"lr", rates},
                            {"loss", losses}}
                           .dump(2));
    return;
  }
  fmt::print("falls fastest at  {}\nlowest at         {}\ndiverges at       {}\npage              {}\n",
             or_nowhere(range.steepest), or_nowhere(range.lowest), or_nowhere(range.diverged),
             report::as_typed(page));
  if (range.steepest) {
    fmt::print("try               --optim.lr={:.2g}\n", *range.steepest);
  } else {
    log_warning("the loss falls at no rate from {} to {}; try others with --min and --max, or more --steps",
                options.least, options.most);
  }
}

int find_lr(const FindLrOptions& options, Front& front) {
  check(options);
  const TrainJob job = job_of(options, front);
  check_weights(std::nullopt, prepare_train_job(job, front).config.config);
  worker_path();  // throws when there is none
  const FinishedJob finished = run_train_job(job, front);
  const bool exploded = finished.code == static_cast<int>(ExitCode::kNumerics);
  if (finished.code != 0 && !exploded) return finished.code;
  const report::RunRecord run = report::read_run(finished.run_directory);
  report::Curve losses = report::loss_over_lr(run);
  if (exploded) {
    const double rate = next_rate(options, losses);
    log_info("the test ends at a learning rate of {:.2g}: the loss was no longer finite", rate);
    losses.add(rate, std::nan(""));
  }
  const report::LrRange range = report::lr_range_of(losses);
  const std::string page = options.output.empty() ? finished.run_directory + "/find-lr.html" : options.output;
  write_file_atomic(page, report::lr_range_page(range, report::as_typed(finished.run_directory)));
  print(options, range, finished.run_directory, page);
  return 0;
}

}  // namespace

void add_find_lr(CLI::App& app, Front& front) {
  auto options = std::make_shared<FindLrOptions>();
  CLI::App* verb =
      app.add_subcommand("find-lr", "Train a little at rising learning rates, and draw the loss over them");
  add_config_file(*verb, options->job.config);
  verb->add_option("--min", options->least, "Learning rate of the first step (default: 1e-7)")
      ->option_text("LR");
  verb->add_option("--max", options->most, "Learning rate of the last step (default: 1)")->option_text("LR");
  verb->add_option("--steps", options->steps, "Steps, each at one factor above the last (default: 100)")
      ->option_text("N");
  verb->add_option("-n,--ranks", options->job.ranks, "Ranks (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--run-dir", options->job.run_dir,
                   "Parent of run directories (default: $TRIREME_RUN_DIR, else ./runs)")
      ->option_text("DIR");
  verb->add_option("-o,--output", options->output,
                   "Path of the page with the curve (default: find-lr.html in the run's directory)")
      ->option_text("FILE");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value, but for those of the schedule, validation and "
      "checkpoints, which the test sets. The run lies in find_lr below the run directories, where 'latest' "
      "and "
      "--resume do not look. A loss that is no longer finite ends it early.\n"
      "Examples:\n"
      "  trireme find-lr configs/quickstart.yaml\n"
      "  trireme find-lr configs/quickstart.yaml --min 1e-5 --max 0.1 --steps 200 --json");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return find_lr(*options, front); }; });
}

}  // namespace trireme::cli
