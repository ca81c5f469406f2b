#include "trireme/cli/train_job.h"

#include <filesystem>

#include "trireme/base/build_info.h"
#include "trireme/base/file.h"
#include "trireme/base/host.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/store.h"
#include "trireme/cli/child.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/runs.h"
#include "trireme/cli/train_attempts.h"
#include "trireme/cli/weights.h"
#include "trireme/launch/exits.h"
#include "trireme/launch/local.h"
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

/// Of a run that could not say so itself.
void say_how_it_ended(const report::RunDirectory& directory, int code, int64_t ranks) {
  if (code == 0 || std::filesystem::exists(directory.file("summary.json"))) return;
  const std::string run = report::as_typed(directory.path());
  const bool by_signal = is_stop_code(code);
  if (code == static_cast<int>(ExitCode::kPreempted) || (by_signal && can_go_on(directory))) {
    log_info("run     {} was stopped; '{}' continues it", run, report::resume_command(run, ranks));
  } else if (by_signal) {
    log_info("run     {} was stopped before it had saved any weights; '{}' starts it again", run,
             report::again_command(run, ranks));
  } else {
    log_info("run     {} ended with code {}{}; its logs are in {}/logs", run, code, launch::meaning(code),
             run);
  }
}

std::string runs_root(const TrainJob& job, const Front& front) {
  return job.run_dir.empty() ? front.runs_root() : job.run_dir;
}

std::string config_name(const TrainJob& job, const Front& front) {
  return plan::load({.path = job.config, .text = "", .overrides = job.overrides}, front.environment)
      .config.name;
}

/// Of the runs of that name that have checkpoints and do not run now, the newest; empty where that one has
/// come to its end: what it has left behind is not taken up again.
std::string newest_unfinished(const std::string& root, const std::string& name) {
  for (const std::string& path : report::list_runs(root, name)) {
    const report::RunDirectory run = report::RunDirectory::open(path);
    if (!can_go_on(run)) continue;
    if (run.holder()) {
      log_info("resume  skipped {}, which is running", report::as_typed(path));
      continue;
    }
    return run.has_finished() ? std::string() : path;
  }
  return {};
}

/// Whose folder and records a second process would damage.
EnvironmentError is_running(const report::RunDirectory& run, const std::string& process) {
  return EnvironmentError(
      "[cli.train] {} is running: process {} writes to it; stop it first, or choose another run", run.path(),
      process);
}

void refuse_running(const report::RunDirectory& run) {
  if (const auto process = run.holder()) throw is_running(run, *process);
}

/// From before this process changes anything in the run until it ends.
report::RunLock hold(const report::RunDirectory& run) {
  std::optional<report::RunLock> lock = run.hold();
  if (!lock) throw is_running(run, run.holder().value_or("unknown"));
  if (const auto process = run.writer()) throw is_running(run, *process);
  return std::move(*lock);
}

/// Of --resume, which takes the word behind it.
void refuse_file(const std::string& word) {
  if (!std::filesystem::is_regular_file(word)) return;
  throw ConfigError(
      "[cli.train] --resume {}: this is a file, not a run or a checkpoint; if it is the config, put --resume "
      "last, or write --resume=auto",
      word);
}

/// A new run directory, or the one that a run goes on in.
report::RunDirectory directory_for(const Request& request, const std::string& name,
                                   const report::Manifest& manifest) {
  return request.run_dir.empty() ? report::RunDirectory::create(request.runs_root, name, manifest)
                                 : report::RunDirectory::open(request.run_dir);
}

}  // namespace

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
    // Above all its levels: the profiler's library calls it an error that there is no GPU.
    if (!environment.get("KINETO_LOG_LEVEL")) environment.set("KINETO_LOG_LEVEL", "5");
    return;
  }
  if (environment.get("PYTORCH_ALLOC_CONF") || environment.get("PYTORCH_CUDA_ALLOC_CONF")) return;
  // The one place for the allocator's settings (docs/host.md). Segments that grow in place keep it from
  // fragmenting; peers read memory that is not the allocator's.
  environment.set("PYTORCH_ALLOC_CONF", "expandable_segments:True");
}

/// Nothing that such workers have begun is worth waiting for.
constexpr double kStopSeconds = 3.0;

int run_workers(const Request& request, Environment environment, plan::Device device, int64_t ranks) {
  prepare_torch(environment, device);
  return launch::run_local({.program = worker_path(),
                            .args = {request.verb},
                            .ranks = ranks,
                            .environment = worker_environment(environment, request),
                            .log_dir = "",
                            .stop_s = kStopSeconds});
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
    point.run_directory = newest_unfinished(root, config_name(job, front));
  } else if (checkpoint::is_checkpoint(job.resume)) {
    point.checkpoint = std::filesystem::canonical(job.resume);
    const std::filesystem::path run = std::filesystem::path(point.checkpoint).parent_path().parent_path();
    if (std::filesystem::exists(run / "manifest.json")) point.run_directory = run;
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

PreparedJob prepare_train_job(const TrainJob& job, const Front& front) {
  const plan::ConfigSources sources{.path = job.config, .text = "", .overrides = job.overrides};
  plan::ResolvedConfig resolved = plan::load(sources, front.environment);
  plan::Config& config = resolved.config;
  const int gpus = config.device == plan::Device::kCpu || !kHasCuda ? 0 : gpu_count();
  const plan::Device device = choose_device(config.device, gpus);
  if (config.device != device) {
    config.device = device;
    resolved.origins["device"] = "auto";
  }
  settle_data_path(config, job.config);
  settle_schedule_path(resolved, job.config);
  settle_weights_path(config);
  const int64_t ranks = choose_ranks(job.ranks, device, gpus);
  const RunPlan run = plan_run(config, device, ranks, memory_for(device, ranks));
  return {std::move(resolved), run};
}

FinishedJob run_train_job(TrainJob job, Front& front) {
  const std::optional<ResumePoint> resume = find_resume_point(job, front);
  PreparedJob prepared = prepare_train_job(job, front);
  check_memory(prepared.plan, prepared.config.config);
  check_weights(resume, prepared.config.config);
  const std::string worker = worker_path();
  Request request = train_request(job, front, prepared.config, resume);
  request.finishes = false;
  const RunPlan& run = prepared.plan;
  report::Continuation next{.manifest = {.command = front.command,
                                         .config_yaml = request.config,
                                         .device = std::string(plan::name(run.device)),
                                         .mesh = run.mesh.to_string(),
                                         .ranks = run.ranks,
                                         .schedule = plan::schedule_text(prepared.config.config)}};
  const bool goes_on = !request.run_dir.empty();
  const auto directory = directory_for(request, prepared.config.config.name, next.manifest);
  const report::RunLock lock = hold(directory);
  next.attempt = std::ssize(directory.attempts()) + (goes_on ? 1 : 0);
  request.run_dir = directory.path();
  if (!job.quiet && !job.silent) {
    say_where(directory, prepared.config.config);
    const std::string ranks = goes_on ? changed_ranks(directory, run.ranks) : std::string();
    if (!ranks.empty()) log_info("resume  {}", ranks);
  }
  Environment environment = front.environment;
  prepare_torch(environment, run.device);
  const int code = run_attempts(
      {.program = worker,
       .args = {request.verb},
       .ranks = run.ranks,
       .environment = {},
       .log_dir = directory.file("logs"),
       .explains_failures = true,
       .stop_notice = "stopping after this step; again to abort now",
       .memory_advice = [&] { return plan::memory_advice(prepared.config.config, run.ranks, run.device); }},
      request, environment, directory, next, job.restarts);
  if (!job.silent) say_how_it_ended(directory, code, request.ranks);
  return {code, directory.path(), std::move(prepared)};
}

}  // namespace trireme::cli
