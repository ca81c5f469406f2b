#pragma once
// A training run started by this process: from config and overrides to ranks and their run directory.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/cli/front.h"
#include "trireme/cli/request.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_attempts.h"
#include "trireme/controller/address.h"

namespace trireme::cli {

struct TrainJob {
  std::string config;                  ///< YAML file; empty: defaults
  std::string deepspeed = {};          ///< DeepSpeed's JSON file; empty: none
  std::vector<std::string> overrides;  ///< "section.key=value", later ones win
  std::optional<int64_t> ranks;        ///< none: all GPUs, else 2
  std::string run_dir;                 ///< parent of the run directory; empty: the front's
  std::string resume = {};             ///< "auto", "latest", a run or a checkpoint; empty: a new run
  RestartOptions restarts = {};
  bool controller = false;                         ///< steps are made when this process says so
  std::optional<controller::Address> server = {};  ///< whose workers make them; none: workers of its own
  bool json = false;
  bool quiet = false;    ///< no start-up lines, no progress
  bool silent = false;   ///< nothing on stdout
  double limit_s = 0.0;  ///< as launch::LocalJob has it
};

/// The config with "auto" devices resolved for this machine, and what the run will be.
struct PreparedJob {
  plan::ResolvedConfig config;
  RunPlan plan;
};

/// A config with "auto" devices resolved, and the ranks that it is planned for.
struct PlannedRanks {
  plan::ResolvedConfig config;
  plan::Device device = plan::Device::kCpu;  ///< kCpu or kCuda
  int64_t count = 1;
  DeviceMemory there;
};

struct FinishedJob {
  int code = 0;
  int signal = 0;  ///< that asked to stop, also one that came when the run was done; 0: none
  std::string run_directory;
  PreparedJob prepared;
};

/// Resolves the device, plans, makes the run directory, runs the ranks to their end, in as many attempts as
/// it takes and may, and leaves their exit code in the manifest. Says at the start where the run is, and at
/// the end when it left no summary. Throws ConfigError, OutOfMemory and EnvironmentError before anything is
/// started.
FinishedJob run_train_job(TrainJob job, Front& front);

/// Throws ConfigError where train.fast_dev_run is set: only `trireme train` itself can do what it asks for.
void refuse_dev_run(const plan::Config& config);

/// The config of the job's sources. `world_size`: of the launcher that this process is a rank of; none: the
/// job's ranks start here.
plan::ResolvedConfig load_config(const TrainJob& job, const Front& front,
                                 std::optional<int64_t> world_size = {});

/// The parent of the job's run directory.
std::string runs_root(const TrainJob& job, const Front& front);

/// Resolves config, device and data path, and plans. Throws ConfigError.
PreparedJob prepare_train_job(const TrainJob& job, const Front& front);

/// Makes a run that model.weights names, by its name below runs_root(), the path of its weights: before the
/// job's own run directory goes elsewhere.
void settle_weights_of(TrainJob& job, const Front& front);

/// Prepares a run that is only planned: GPUs may be others than this machine's, as many as there are
/// ranks (-n, else one). `gpu`: their kind (plan::gpu_bytes()); empty: this machine's, or unknown ones if the
/// config asks for them and it has none. A note says for which GPUs the plan is.
PreparedJob plan_train_job(const TrainJob& job, const Front& front, const std::string& gpu);
/// As plan_train_job(), before mesh and batch are fitted to the ranks.
PlannedRanks plan_ranks(const TrainJob& job, const Front& front, const std::string& gpu);

/// The memory that `local_ranks` ranks of this host find on `device`.
DeviceMemory memory_for(plan::Device device, int64_t local_ranks);

/// Throws OutOfMemory when ranks cannot fit whatever else is true; warns when they are predicted not to.
void check_memory(const RunPlan& plan, const plan::Config& config);

/// Where a run goes on.
struct ResumePoint {
  std::string run_directory;  ///< empty: there is none, and a new one begins
  std::string checkpoint;     ///< one of its checkpoints; empty: the newest that is whole
  std::string why_new = {};   ///< where a new one begins: "because runs/... has finished"
};

/// The run or checkpoint that TrainJob::resume names; none if it is empty. A job without a config gets the
/// config of the run. "auto" is the newest run with the config's name that has a checkpoint and does not run
/// now, unless that run has come to its end: then an older one with the very config that is asked for now, if
/// the newer ones had another, and else a new run. A run whose launcher was killed is waited for until its
/// ranks have ended, for up to 10 s. Throws ConfigError when it names a run or checkpoint that is not there,
/// EnvironmentError when the run runs now.
std::optional<ResumePoint> find_resume_point(TrainJob& job, const Front& front);

/// Logs the notes of a config for its user.
void say_notes(const plan::ResolvedConfig& resolved);

/// "on 2 ranks, 4 before" where the last attempt at `run` had another number than `ranks`; else empty.
std::string changed_ranks(const report::RunDirectory& run, int64_t ranks);

/// The request that workers get.
Request train_request(const TrainJob& job, const Front& front, const plan::ResolvedConfig& resolved,
                      const std::optional<ResumePoint>& resume);

/// Defaults of libtorch's own settings for workers on `device`; a user's setting wins.
void prepare_torch(Environment& environment, plan::Device device);

/// Runs request.verb on `ranks` local workers, without a run directory, to its end. Returns the exit code.
int run_workers(const Request& request, Environment environment, plan::Device device, int64_t ranks);

}  // namespace trireme::cli
