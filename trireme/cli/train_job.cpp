#include "trireme/cli/train_job.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <thread>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/file.h"
#include "trireme/base/host.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/store.h"
#include "trireme/cli/child.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/drive_run.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/kept_files.h"
#include "trireme/cli/runs.h"
#include "trireme/cli/train_attempts.h"
#include "trireme/cli/weights.h"
#include "trireme/cli/words.h"
#include "trireme/launch/exits.h"
#include "trireme/launch/local.h"
#include "trireme/plan/deepspeed.h"
#include "trireme/plan/gpus.h"
#include "trireme/plan/pipeline.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

bool can_go_on(const report::RunDirectory& run) {
  return checkpoint::has_checkpoint(run.file("checkpoints"));
}

/// Before the first line of any rank.
void say_where(const report::RunDirectory& directory, const plan::Config& config) {
  log_info(
      "run     {}{}", report::as_typed(directory.path()),
      config.checkpoint.final_weights ? ", weights at the end in checkpoints/final/model.safetensors" : "");
}

/// For a run that failed after it had begun or gone on: logs the error and how to go on.
void say_failure(const report::RunDirectory& directory, int code, int64_t ranks) {
  const std::string run = report::as_typed(directory.path());
  const report::Attempt last = directory.attempts().back();
  const bool was_killed = code > 128;  // an exit code says no more than its meaning
  const std::string why = last.error.empty() && was_killed ? last.cause : last.error;
  std::error_code absent;  // ranks of another server have printed to their own terminals
  const bool has_logs = std::filesystem::exists(directory.file("logs"), absent);
  log_info("run     {} ended with code {}{}{}{}", run, code, launch::meaning(code),
           why.empty() ? "" : ": " + why, has_logs ? fmt::format("; its logs are in {}/logs", run) : "");
  if (can_go_on(directory))
    log_info("next    '{}' continues from its last checkpoint", report::resume_command(run, ranks));
}

/// Logs the end of a run that could not do so itself. `took_part`: this command's ranks went on with it.
void say_how_it_ended(const report::RunDirectory& directory, int code, int64_t ranks, bool took_part) {
  if (code == 0 || std::filesystem::exists(directory.file("summary.json"))) return;
  const std::string run = report::as_typed(directory.path());
  const bool by_signal = is_stop_code(code);
  if (code == static_cast<int>(ExitCode::kPreempted) || (by_signal && can_go_on(directory))) {
    log_info("run     {} was stopped; '{}' continues it", run, report::resume_command(run, ranks));
  } else if (by_signal) {
    log_info("run     {} was stopped before it had saved any weights; '{}' starts it again", run,
             report::again_command(run, ranks));
  } else if (took_part) {
    say_failure(directory, code, ranks);
  } else {
    log_info("run     {} stays as it was: the ranks ended with code {}{}; their logs are in {}/logs", run,
             code, launch::meaning(code), run);
  }
}

/// GPUs that a run of `config` may use.
int gpus_for(const plan::Config& config) {
  return config.device == plan::Device::kCpu || !kHasCuda ? 0 : gpu_count();
}

/// The config with the paths that its ranks are given.
plan::ResolvedConfig settled_config(const TrainJob& job, const Front& front,
                                    std::optional<int64_t> world_size = {}) {
  plan::ResolvedConfig resolved = load_config(job, front, world_size);
  settle_data_path(resolved.config, job.config);
  check_texts(resolved.config);
  settle_tokenizer(resolved, job.config);
  settle_kept_files(resolved, job.config);
  settle_weights_path(resolved.config, runs_root(job, front));
  return resolved;
}

/// Whether the run was made to do what `asked` says, and not something else under the same name.
bool is_same_job(const report::RunDirectory& run, const plan::Config& asked) {
  const plan::Config then =
      plan::load({.path = run.file("config.yaml"), .text = "", .overrides = {}}, Environment()).config;
  return std::ranges::all_of(plan::differing_keys(then, asked), [&](const std::string& key) {
    return key == "device" && asked.device == plan::Device::kAuto;
  });
}

/// Ranks whose launcher was killed notice it and end, but not at once.
void await_orphan(const report::RunDirectory& run) {
  constexpr double kLongest_s = 10.0;
  constexpr auto kPause = std::chrono::milliseconds(20);
  const auto process = run.orphan();
  if (!process) return;
  log_info("resume  waits for process {} of {} to end: its launcher was killed", *process,
           report::as_typed(run.path()));
  for (const double begin = monotonic_seconds(); run.orphan() && monotonic_seconds() < begin + kLongest_s;)
    std::this_thread::sleep_for(kPause);
}

/// The runs of a name, among which `auto` chooses.
class Candidates {
 public:
  explicit Candidates(const plan::Config& asked) : asked_(asked) {}

  /// Whether the run at `path` is the one to go on with. They come newest first, and is_over() ends the
  /// search.
  bool takes(const std::string& path) {
    const report::RunDirectory run = report::RunDirectory::open(path);
    if (!can_go_on(run)) return false;
    await_orphan(run);
    if (run.holder()) {
      log_info("resume  skipped {}, which is running", report::as_typed(path));
      return false;
    }
    if (!run.has_finished()) {
      // If a newer run has finished, only the very job that is asked for is meant.
      if (!finished_.empty() && !is_same_job(run, asked_)) return false;
      if (!finished_.empty())
        log_info("resume  passed over {}, which has finished with another config", finished_);
      return true;
    }
    if (finished_.empty()) finished_ = report::as_typed(path);
    is_over_ = is_same_job(run, asked_);
    if (is_over_) finished_ = report::as_typed(path);
    return false;
  }

  bool is_over() const { return is_over_; }
  const std::string& finished() const { return finished_; }

 private:
  const plan::Config& asked_;
  std::string finished_;  ///< as typed
  bool is_over_ = false;
};

/// The run that `auto` stands for, or why there is none. A run that cannot be read is named, and keeps nobody
/// from the others.
ResumePoint find_automatically(const std::string& root, const plan::Config& asked) {
  Candidates candidates(asked);
  for (const std::string& path : report::list_runs(root, asked.name)) {
    try {
      if (candidates.takes(path)) return {.run_directory = path, .checkpoint = ""};
    } catch (const Error& error) {
      log_warning("resume  skipped {}: {}", report::as_typed(path), error.what());
    }
    if (candidates.is_over()) break;
  }
  std::string why = candidates.finished().empty()
                        ? fmt::format("because no run named '{}' below {} has a checkpoint to go on from",
                                      asked.name, report::as_typed(root))
                        : fmt::format("because {} has finished", candidates.finished());
  return {.run_directory = "", .checkpoint = "", .why_new = std::move(why)};
}

/// The error for a run that is running: a second process would damage its folder and records.
EnvironmentError is_running(const report::RunDirectory& run, const std::string& process) {
  return EnvironmentError(
      "[cli.train] {} is running: process {} writes to it; stop it first, or choose another run", run.path(),
      process);
}

void refuse_running(const report::RunDirectory& run) {
  await_orphan(run);
  if (const auto process = run.holder()) throw is_running(run, *process);
}

/// The run's lock, held from before this process changes anything in the run until it ends.
LockFile hold(const report::RunDirectory& run) {
  std::optional<LockFile> lock = run.hold();
  if (!lock) throw is_running(run, run.holder().value_or("unknown"));
  if (const auto process = run.writer()) throw is_running(run, *process);
  return std::move(*lock);
}

/// Refuses a file behind --resume, which takes the next word as its value.
void refuse_file(const std::string& word) {
  if (!std::filesystem::is_regular_file(word)) return;
  throw ConfigError(
      "[cli.train] --resume {}: this is a file, not a run or a checkpoint; if it is the config, put --resume "
      "last, or write --resume=auto",
      word);
}

/// A checkpoint that a run lies around is that run's, wherever a link to the run leads.
ResumePoint at_checkpoint(const std::string& path) {
  namespace fs = std::filesystem;
  fs::path checkpoint = fs::absolute(path).lexically_normal();
  if (!checkpoint.has_filename()) checkpoint = checkpoint.parent_path();
  const fs::path run = checkpoint.parent_path().parent_path();
  if (!fs::exists(run / "manifest.json")) return {.run_directory = "", .checkpoint = fs::canonical(path)};
  const std::string directory = report::RunDirectory::open(run).path();
  return {.run_directory = directory,
          .checkpoint = fs::path(directory) / checkpoint.parent_path().filename() / checkpoint.filename()};
}

/// A new run directory, or the one that a run goes on in.
report::RunDirectory directory_for(const Request& request, const std::string& name,
                                   const report::Manifest& manifest) {
  return request.run_dir.empty() ? report::RunDirectory::create(request.runs_root, name, manifest)
                                 : report::RunDirectory::open(request.run_dir);
}

}  // namespace

std::string runs_root(const TrainJob& job, const Front& front) {
  return job.run_dir.empty() ? front.runs_root() : job.run_dir;
}

void settle_weights_of(TrainJob& job, const Front& front) {
  plan::Config config = load_config(job, front).config;
  if (config.model.weights.empty()) return;
  settle_weights_path(config, runs_root(job, front));
  job.overrides.push_back("model.weights=" + config.model.weights);
}

DeviceMemory memory_for(plan::Device device, int64_t local_ranks) {
  if (device == plan::Device::kCuda) return {.bytes = gpu_memory(), .ranks = 1};
  return {.bytes = host_memory(), .ranks = local_ranks};
}

void check_memory(const RunPlan& plan, const plan::Config& config) {
  if (plan.cannot_fit()) {
    throw OutOfMemory("[cli.train] {} at least. {}", fit_text(plan, plan.needed.least()),
                      plan::memory_advice(config, plan.ranks, plan.device));
  }
  if (!plan.fits()) {
    log_warning("by prediction this run {}; 'trireme train --dry-run' shows what needs the memory",
                fit_text(plan, plan.needed.peak()));
  }
}

void prepare_torch(Environment& environment, plan::Device device) {
  // A lost peer makes c10d warn with stack traces; our own message says which rank was lost and when.
  if (!environment.get("TORCH_CPP_LOG_LEVEL")) environment.set("TORCH_CPP_LOG_LEVEL", "ERROR");
  if (device != plan::Device::kCuda) {
    // A level above all of its own: the profiler's library logs as an error that there is no GPU.
    if (!environment.get("KINETO_LOG_LEVEL")) environment.set("KINETO_LOG_LEVEL", "5");
    return;
  }
  if (environment.get("PYTORCH_ALLOC_CONF") || environment.get("PYTORCH_CUDA_ALLOC_CONF")) return;
  // The one place for the allocator's settings (docs/host.md). Segments that grow in place keep it from
  // fragmenting; peers read memory that is not the allocator's.
  environment.set("PYTORCH_ALLOC_CONF", "expandable_segments:True");
}

/// Ranks that wait for one that hangs report it once comm.timeout_s has passed. The launcher lets them speak
/// first, since they know what they waited in.
constexpr double kBeyondRanks_s = 10.0;

/// Short, since no work that such workers have begun is worth waiting for.
constexpr double kStopSeconds = 3.0;

/// CUDA does not outlive a fork; whether its libraries, loaded and unused, do is not for us to say.
bool loads_once(plan::Device device) {
  return device == plan::Device::kCpu;
}

int run_workers(const Request& request, Environment environment, plan::Device device, int64_t ranks) {
  prepare_torch(environment, device);
  return launch::run_local({.program = worker_path(),
                            .args = {request.verb},
                            .ranks = ranks,
                            .environment = worker_environment(environment, request),
                            .serves_forks = loads_once(device),
                            .log_dir = "",
                            .stop_s = kStopSeconds});
}

void say_notes(const plan::ResolvedConfig& resolved) {
  for (const std::string& note : resolved.notes) log_info("note    {}", note);
}

std::string changed_ranks(const report::RunDirectory& run, int64_t ranks) {
  const int64_t before = run.attempts().back().ranks;
  if (before == 0 || before == ranks) return {};
  return fmt::format("on {} rank{}, {} before", ranks, ranks == 1 ? "" : "s", before);
}

std::optional<ResumePoint> find_resume_point(TrainJob& job, const Front& front) {
  if (job.resume.empty()) return std::nullopt;
  const std::string root = runs_root(job, front);
  ResumePoint point;
  if (job.resume == "auto") {
    point = find_automatically(root, settled_config(job, front).config);
  } else if (checkpoint::is_checkpoint(job.resume)) {
    point = at_checkpoint(job.resume);
  } else {
    refuse_file(job.resume);
    const Wanted wanted{.what = "checkpoints", .file = "checkpoints/step-*", .is_there = can_go_on};
    point.run_directory = find_run(job.resume, root, wanted).path();
  }
  if (!point.run_directory.empty()) refuse_running(report::RunDirectory::open(point.run_directory));
  if (job.config.empty() && !point.run_directory.empty()) job.config = point.run_directory + "/config.yaml";
  return point;
}

Request train_request(const TrainJob& job, const Front& front, const plan::ResolvedConfig& resolved,
                      const std::optional<ResumePoint>& resume) {
  return {.verb = "train",
          .config = plan::to_yaml(resolved, true),
          .run_dir = resume ? resume->run_directory : "",
          .runs_root = runs_root(job, front),
          .resume = resume && !(resume->run_directory.empty() && resume->checkpoint.empty()),
          .resume_from = resume ? resume->checkpoint : "",
          .ranks = job.ranks.value_or(0),
          .command = front.command,
          .json = job.json,
          .quiet = job.quiet,
          .silent = job.silent,
          .generate = {}};
}

plan::ResolvedConfig load_config(const TrainJob& job, const Front& front, std::optional<int64_t> world_size) {
  const plan::ConfigSources sources{.path = job.config, .text = "", .overrides = job.overrides};
  if (job.deepspeed.empty()) return plan::load(sources, front.environment);
  const auto ranks = [&](const plan::Config& config) -> std::optional<int64_t> {
    if (world_size) return world_size;
    const int gpus = gpus_for(config);
    return choose_ranks(job.ranks, choose_device(config.device, gpus), gpus);
  };
  return plan::load(sources, {.path = job.deepspeed, .text = "", .ranks = ranks}, front.environment);
}

namespace {

PlannedRanks settled_ranks(plan::ResolvedConfig resolved, plan::Device device, int64_t ranks,
                           DeviceMemory there) {
  if (resolved.config.device != device) {
    resolved.config.device = device;
    resolved.origins["device"] = "auto";
  }
  return {std::move(resolved), device, ranks, there};
}

PreparedJob planned(PlannedRanks ranks) {
  RunPlan run = plan_run(ranks.config.config, ranks.device, ranks.count, ranks.there);
  run.notes = ranks.config.notes;
  return {std::move(ranks.config), std::move(run)};
}

/// The ranks that start here.
PlannedRanks ranks_here(const TrainJob& job, const Front& front) {
  plan::ResolvedConfig resolved = settled_config(job, front);
  const int gpus = gpus_for(resolved.config);
  const plan::Device device = choose_device(resolved.config.device, gpus);
  const int64_t ranks = choose_ranks(job.ranks, device, gpus);
  return settled_ranks(std::move(resolved), device, ranks, memory_for(device, ranks));
}

/// Says for which GPUs a plan is.
std::string note_of(const std::string& gpu, int64_t ranks, int gpus, int64_t bytes) {
  if (!gpu.empty())
    return fmt::format("planned for {} GPUs of {} each (--gpu {})", ranks, bytes_text(bytes), gpu);
  if (gpus == 0) {
    return fmt::format(
        "planned for {} GPUs of unknown memory, since this machine has none that this build can use; "
        "--gpu h100, or their GiB, says whether it fits",
        ranks);
  }
  return fmt::format("planned for {} GPUs like the {} of this machine; --gpu names others", ranks, gpus);
}

}  // namespace

PreparedJob prepare_train_job(const TrainJob& job, const Front& front) {
  return planned(ranks_here(job, front));
}

PreparedJob plan_train_job(const TrainJob& job, const Front& front, const std::string& gpu) {
  return planned(plan_ranks(job, front, gpu));
}

PlannedRanks plan_ranks(const TrainJob& job, const Front& front, const std::string& gpu) {
  constexpr int kAsManyAsAsked = std::numeric_limits<int>::max();
  const bool named = !gpu.empty();
  const int64_t ranks = choose_ranks(job.ranks.value_or(1), plan::Device::kCuda, kAsManyAsAsked);
  plan::ResolvedConfig resolved = settled_config(job, front, named ? std::optional(ranks) : job.ranks);
  const plan::Device asked = resolved.config.device;
  if (named && asked == plan::Device::kCpu)
    throw ConfigError("[cli.plan] --gpu {} plans for GPUs, but device is cpu; remove one of them", gpu);
  const int gpus = gpus_for(resolved.config);
  if (!named && (asked != plan::Device::kCuda || ranks <= gpus)) return ranks_here(job, front);
  const DeviceMemory there{.bytes = named ? plan::gpu_bytes(gpu) : gpu_memory(), .ranks = 1};
  resolved.notes.push_back(note_of(gpu, ranks, gpus, there.bytes));
  return settled_ranks(std::move(resolved), plan::Device::kCuda, ranks, there);
}

void refuse_dev_run(const plan::Config& config) {
  if (config.train.fast_dev_run == 0) return;
  throw ConfigError(
      "[cli.train] train.fast_dev_run={} tries a new run, with ranks that 'trireme train' starts itself; "
      "remove "
      "it where a run goes on, under another launcher and in other commands",
      config.train.fast_dev_run);
}

namespace {

/// Workers of a controller are this build's, whatever program has asked for the run.
void refuse_program_on_workers(const TrainJob& job, const Environment& environment) {
  if (!job.controller || !environment.get(kProgramVariable)) return;
  throw ConfigError(
      "[cli.train] --controller drives workers that lack the data, metrics and callbacks of your program; "
      "remove "
      "it");
}

/// How this job runs the ranks of an attempt. `environment` must outlive what it returns.
RunRanks ranks_of(const TrainJob& job, plan::Device device, const Environment& environment) {
  using launch::Launcher, launch::LocalJob;
  if (job.server) {
    return [server = *job.server, &environment](Launcher&, const LocalJob&, const Request& request) {
      return run_on_server(server, request, environment);
    };
  }
  if (job.controller) {
    return [device, &environment](Launcher& launcher, const LocalJob& ranks, const Request& request) {
      return run_with_own_workers(launcher, ranks, request, device, environment);
    };
  }
  return [](Launcher& launcher, const LocalJob& ranks, const Request&) { return launcher.run(ranks); };
}

}  // namespace

FinishedJob run_train_job(TrainJob job, Front& front) {
  const std::optional<ResumePoint> resume = find_resume_point(job, front);
  PreparedJob prepared = prepare_train_job(job, front);
  refuse_dev_run(prepared.config.config);
  check_memory(prepared.plan, prepared.config.config);
  check_weights(resume, prepared.config.config);
  check_cache_folder(prepared.config.config, front.environment);
  check_program_data(prepared.config.config, front.environment);
  refuse_program_on_workers(job, front.environment);
  const std::string worker = trainer_path(front.environment);
  Request request = train_request(job, front, prepared.config, resume);
  request.finishes = false;
  const RunPlan& run = prepared.plan;
  report::Continuation next{.manifest = {.command = front.command,
                                         .program = front.environment.get(kProgramVariable).value_or(""),
                                         .config_yaml = request.config,
                                         .device = std::string(plan::name(run.device)),
                                         .mesh = run.mesh.to_string(),
                                         .ranks = run.ranks,
                                         .files = files_to_keep(prepared.config.config)}};
  const bool goes_on = !request.run_dir.empty();
  const auto directory = directory_for(request, prepared.config.config.name, next.manifest);
  const LockFile lock = hold(directory);
  next.attempt = std::ssize(directory.attempts()) + (goes_on ? 1 : 0);
  request.run_dir = directory.path();
  if (resume && !resume->why_new.empty() && !job.silent)
    log_info("resume  starts a new run, {}", resume->why_new);
  if (!job.quiet && !job.silent) {
    say_where(directory, prepared.config.config);
    say_notes(prepared.config);
    const std::string ranks = goes_on ? changed_ranks(directory, run.ranks) : std::string();
    if (!ranks.empty()) log_info("resume  {}", ranks);
  }
  Environment environment = front.environment;
  prepare_torch(environment, run.device);
  int signal = 0;
  const RunRanks run_ranks = ranks_of(job, run.device, environment);
  const RunRanks noting_signals = [&](launch::Launcher& launcher, const launch::LocalJob& ranks,
                                      const Request& asked) {
    launch::JobEnd end = run_ranks(launcher, ranks, asked);
    signal = end.signal;
    return end;
  };
  const int code = run_attempts(
      {.program = worker,
       .args = {request.verb},
       .ranks = run.ranks,
       .environment = {},
       .serves_forks = loads_once(run.device),
       .log_dir = directory.file("logs"),
       .limit_s = job.limit_s,
       .silence_s = prepared.config.config.comm.timeout_s + kBeyondRanks_s,
       .explains_failures = true,
       .stop_notice = "stopping after this step; again to abort now",
       .memory_advice = [&] { return plan::memory_advice(prepared.config.config, run.ranks, run.device); }},
      request, environment, directory, next, job.restarts, noting_signals);
  const bool took_part = std::ssize(directory.attempts()) >= next.attempt;
  if (!job.silent) say_how_it_ended(directory, code, request.ranks, took_part);
  return {.code = code, .signal = signal, .run_directory = directory.path(), .prepared = std::move(prepared)};
}

}  // namespace trireme::cli
