#include "trireme/cli/bench_runs.h"

#include <CLI/CLI.hpp>

#include "trireme/base/streams.h"
#include "trireme/base/text.h"
#include "trireme/cli/child.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/weights.h"

namespace trireme::cli {
namespace {

TrainJob job_of(const BenchRun& run, const BenchRuns& options, const Front& front) {
  TrainJob job{.config = options.config,
               .overrides = front.overrides,
               .ranks = options.ranks,
               .run_dir = options.run_dir,
               .json = false,
               .quiet = true,
               .silent = true};
  job.overrides.insert(job.overrides.end(), run.overrides.begin(), run.overrides.end());
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
  verb.add_option("--run-dir", options.run_dir, "Parent of the run directories")->option_text("DIR");
  verb.add_flag("--json", options.json, "Print one JSON document");
}

std::vector<plan::Policy> policies_of(const BenchRuns& options) {
  std::vector<plan::Policy> rows;
  for (const std::string& label : split(options.policies, ',')) rows.push_back(plan::find_policy(label));
  return rows;
}

std::vector<std::string> overrides_of(const plan::Policy& policy) {
  return {fmt::format("parallel.policy={}", policy.name),
          fmt::format("parallel.sharding={}", policy.sharding), "checkpoint.final_weights=false",
          "train.sample_tokens=0"};
}

void check_runs(const std::vector<BenchRun>& runs, const BenchRuns& options, const Front& front) {
  for (const BenchRun& run : runs) {
    const PreparedJob prepared = prepare_train_job(job_of(run, options, front), front);
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
    return {.code = finished.code, .run_directory = finished.run_directory};
  } catch (const Error& error) {
    // What was measured before is worth printing.
    write_stderr(fmt::format("bench: {} could not run: {}\n", run.label, error.what()));
    return {.code = static_cast<int>(error.exit_code()), .run_directory = ""};
  }
}

}  // namespace trireme::cli
