#include "trireme/cli/bench_runs.h"

#include <CLI/CLI.hpp>

#include "trireme/base/streams.h"
#include "trireme/base/text.h"
#include "trireme/cli/train_job.h"

namespace trireme::cli {

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

BenchResult train_once(const BenchRun& run, const BenchRuns& options, Front& front) {
  TrainJob job{.config = options.config,
               .overrides = front.overrides,
               .ranks = options.ranks,
               .run_dir = options.run_dir,
               .json = false,
               .quiet = true,
               .silent = true};
  job.overrides.insert(job.overrides.end(), run.overrides.begin(), run.overrides.end());
  write_stderr(fmt::format("bench: {}\n", run.label));
  try {
    const FinishedJob finished = run_train_job(job, front);
    if (finished.code != 0) {
      write_stderr(fmt::format("bench: {} ended with code {}; its logs are in {}/logs\n", run.label,
                               finished.code, finished.run_directory));
    }
    return {.code = finished.code, .run_directory = finished.run_directory};
  } catch (const OutOfMemory& error) {
    write_stderr(fmt::format("bench: skipping {}: {}\n", run.label, error.what()));
    return {.code = static_cast<int>(ExitCode::kOutOfMemory), .run_directory = ""};
  }
}

}  // namespace trireme::cli
