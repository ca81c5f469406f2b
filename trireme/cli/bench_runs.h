#pragma once
// Training runs that are there to be measured: one after the other, each in ranks of its own. They lie in
// bench/ below the folder of runs, where neither `latest` nor --resume nor a run's name finds them.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/cli/front.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/policy.h"
#include "trireme/report/cost_table.h"

namespace CLI {
class App;
}

namespace trireme::cli {

/// Steps of a run that nobody has set on the command line: a config is mostly for far more.
inline constexpr int64_t kBenchSteps = 20;

/// Command-line options that all benches that train have.
struct BenchRuns {
  std::string config;
  std::optional<int64_t> ranks;
  std::string policies = "ddp,zero1,zero2,zero3,fsdp:shard_grad_op";
  std::string run_dir;
  std::optional<int64_t> steps;  ///< none: those of --train.steps, else kBenchSteps
  bool json = false;
  double limit_s = 0.0;  ///< of one run, which is killed then; 0: none
};

void add_options(CLI::App& verb, BenchRuns& options);

/// The rows that --policies names. Throws ConfigError for one that there is not.
std::vector<plan::Policy> policies_of(const BenchRuns& options);

/// One run of a config.
struct BenchRun {
  std::string label;                   ///< "zero2, micro-batch 8"
  std::vector<std::string> overrides;  ///< "section.key=value"; they win over the user's
};

/// The keys that make a run one of `policy`.
std::vector<std::string> overrides_of(const plan::Policy& policy);

/// The config and the plan that all runs of a bench have in common. Throws ConfigError.
PreparedJob prepare(const BenchRuns& options, const Front& front);

/// The config and the plan of one run. Throws ConfigError.
PreparedJob prepare(const BenchRun& run, const BenchRuns& options, const Front& front);

/// Throws ConfigError or EnvironmentError for the first of `runs` that would be refused, so that none is
/// measured in vain. One that does not fit into memory is not refused.
void check_runs(const std::vector<BenchRun>& runs, const BenchRuns& options, const Front& front);

struct BenchResult {
  int code = 0;               ///< of the ranks, or of the error that kept them from being started
  std::string run_directory;  ///< empty: they were not started
};

/// Trains, without output but for lines about what runs and why it could not; what a failed run says itself
/// is shown.
BenchResult train_once(const BenchRun& run, const BenchRuns& options, Front& front);

}  // namespace trireme::cli
