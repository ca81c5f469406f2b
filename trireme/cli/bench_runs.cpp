#include "trireme/cli/bench_runs.h"

#include <CLI/CLI.hpp>

#include "trireme/base/streams.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/weights.h"
#include "trireme/report/step_times.h"

namespace trireme::cli {
namespace {

std::string bench_root(const BenchRuns& options, const Front& front) {
  return (options.run_dir.empty() ? front.runs_root() : options.run_dir) + "/bench";
}

/// Keys that leave out what is not measured: a run saves nothing, validates nothing and draws no sample.
const std::vector<std::string> kMeasuresOnly = {"train.early_stop=0",    "train.early_stop_min_delta=0",
                                                "train.monitor=",        "train.fast_dev_run=0",
                                                "train.epochs=0",        "train.val_batches=0",
                                                "train.sample_tokens=0", "train.profile_steps=0",
                                                "optim.warmup_steps=0",  "checkpoint.every=0",
                                                "checkpoint.best=false", "checkpoint.final_weights=false"};

TrainJob job_of(const BenchRun& run, const BenchRuns& options, const Front& front) {
  TrainJob job{.config = options.config,
               .overrides = {fmt::format("train.steps={}", kBenchSteps)},
               .ranks = options.ranks,
               .run_dir = bench_root(options, front),
               .json = false,
               .quiet = true,
               .silent = true,
               .limit_s = options.limit_s};
  std::vector<std::string>& keys = job.overrides;
  keys.insert(keys.end(), front.overrides.begin(), front.overrides.end());
  if (options.steps) keys.push_back(fmt::format("train.steps={}", *options.steps));
  keys.insert(keys.end(), kMeasuresOnly.begin(), kMeasuresOnly.end());
  keys.insert(keys.end(), run.overrides.begin(), run.overrides.end());
  return job;
}

}  // namespace

void add_options(CLI::App& verb, BenchRuns& options) {
  add_config_file(verb, options.config);
  verb.add_option("-n,--ranks", options.ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb.add_option("--policies", options.policies,
                  fmt::format("Policies of 'trireme plan policy', separated by commas (default: {})",
                              options.policies))
      ->option_text("LIST");
  verb.add_option("--run-dir", options.run_dir, "Parent of bench/, where the runs lie")->option_text("DIR");
  verb.add_option(
          "--steps", options.steps,
          fmt::format("Steps per run, including warm-up (default: --train.steps, else {})", kBenchSteps))
      ->option_text("N")
      ->check(CLI::Range(static_cast<int64_t>(report::kLeastSteps), int64_t{1'000'000}));
  verb.add_flag("--json", options.json, "Print one JSON document");
}

std::vector<plan::Policy> policies_of(const BenchRuns& options) {
  std::vector<plan::Policy> rows;
  for (const std::string& label : split(options.policies, ',')) rows.push_back(plan::find_policy(label));
  return rows;
}

std::vector<std::string> overrides_of(const plan::Policy& policy) {
  return {fmt::format("parallel.policy={}", policy.name),
          fmt::format("parallel.sharding={}", policy.sharding)};
}

PreparedJob prepare(const BenchRuns& options, const Front& front) {
  return prepare({}, options, front);
}

PreparedJob prepare(const BenchRun& run, const BenchRuns& options, const Front& front) {
  return prepare_train_job(job_of(run, options, front), front);
}

void check_runs(const std::vector<BenchRun>& runs, const BenchRuns& options, const Front& front) {
  for (const BenchRun& run : runs) {
    const PreparedJob prepared = prepare(run, options, front);
    check_weights(std::nullopt, prepared.config.config);
  }
  worker_path();  // throws when there is none
}

BenchResult train_once(const BenchRun& run, const BenchRuns& options, Front& front) {
  write_stderr(fmt::format("bench: {}\n", run.label));
  try {
    const FinishedJob finished = run_train_job(job_of(run, options, front), front);
    if (finished.code != 0) {
      write_stderr(fmt::format("bench: {} ended with code {}; its logs are in {}/logs\n", run.label,
                               finished.code, finished.run_directory));
    }
    // A signal that came with the end of a run was meant for the measurement.
    const bool is_late = finished.code == 0 && finished.signal != 0;
    return {.code = is_late ? 128 + finished.signal : finished.code, .run_directory = finished.run_directory};
  } catch (const Error& error) {
    // The measurements of earlier runs are worth printing.
    write_stderr(fmt::format("bench: {} could not run: {}\n", run.label, error.what()));
    return {.code = static_cast<int>(error.exit_code()), .run_directory = ""};
  }
}

}  // namespace trireme::cli
