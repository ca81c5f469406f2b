#include "trireme/cli/worker_run.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>
#include <string_view>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/flight_record.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/kept_files.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/world.h"
#include "trireme/report/classification_view.h"
#include "trireme/report/console.h"
#include "trireme/report/pipeline_view.h"
#include "trireme/report/run_dir.h"
#include "trireme/train/trainer.h"

namespace trireme::cli {
namespace {

std::atomic<int> stop_signal{0};

std::atomic<int64_t> stop_asked_at{0};  ///< ms of the monotonic clock
std::atomic<bool> answers_signals{false};

int64_t milliseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000} * now.tv_sec + now.tv_nsec / 1'000'000;
}

/// Calls only what is safe in a signal handler. Terminals and launchers often send the same request twice, so
/// what comes within a second of the first is the same one.
extern "C" void remember_signal(int number) {
  constexpr int64_t kSameRequest_ms = 1000;
  if (stop_signal == 0) {
    stop_asked_at = milliseconds();
    stop_signal = number;
    constexpr std::string_view kNotice = "stopping after this step; again to abort now\n";
    [[maybe_unused]] const ssize_t written =
        answers_signals ? ::write(STDERR_FILENO, kNotice.data(), kNotice.size()) : 0;
    return;
  }
  if (milliseconds() - stop_asked_at < kSameRequest_ms) return;
  ::signal(number, SIG_DFL);
  ::raise(number);  // delivered when this handler returns
}

/// SIGHUP stays ignored under nohup, which is how a user asks for it.
bool is_ignored(int number) {
  struct sigaction action {};
  ::sigaction(number, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

/// SIGINT, SIGTERM, SIGUSR1 and SIGHUP end the run with its weights written
/// (train::TrainOptions::stop_signal); another one, a second or more later, ends the process at once.
/// `answers`: this rank says so, since its launcher does not.
void install_signal_handlers(bool answers) {
  answers_signals = answers;
  struct sigaction action {};
  action.sa_handler = remember_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);            // who reads no more lines does not end the run
  sigaction(SIGUSR1, &action, nullptr);  // Slurm's --signal=USR1@60 comes before its SIGTERM
  if (!is_ignored(SIGHUP)) sigaction(SIGHUP, &action, nullptr);
}

/// A run that goes on from a checkpoint has it to keep, however early it ends.
extern "C" void end_preempted([[maybe_unused]] int number) {
  ::_exit(static_cast<int>(ExitCode::kPreempted));
}

void install_joining_handlers(bool resumes) {
  if (!resumes) return;
  ::signal(SIGTERM, end_preempted);
  ::signal(SIGUSR1, end_preempted);
  if (!is_ignored(SIGHUP)) ::signal(SIGHUP, end_preempted);
}

report::Manifest manifest_of(const Request& request, const Environment& environment,
                             const plan::Config& config, const comm::World& world) {
  return {.command = request.command,
          .program = environment.get(kProgramVariable).value_or(""),
          .config_yaml = request.config,
          .device = world.device().is_cuda() ? "cuda" : "cpu",
          .mesh = plan::MeshShape::fit(config.parallel, world.size()).to_string(),
          .ranks = world.size(),
          .files = files_to_keep(config)};
}

report::RunDirectory run_directory(const Request& request, const plan::Config& config,
                                   const report::Manifest& manifest) {
  if (!request.run_dir.empty()) return report::RunDirectory::open(request.run_dir);
  return report::RunDirectory::create(request.runs_root, config.name, manifest);
}

/// Whoever completes the manifest counts the attempts.
int64_t attempt_at(const report::RunDirectory& run, const Request& request) {
  if (!request.finishes) return request.attempt;
  return std::ssize(run.attempts()) + (request.run_dir.empty() ? 0 : 1);
}

/// The width of the terminal whose descriptor our launcher names, else of the one behind `otherwise`.
std::function<int64_t()> columns_behind(const Environment& environment, const char* variable, int otherwise) {
  const int fd = static_cast<int>(environment.get_int(variable).value_or(otherwise));
  return [fd] { return terminal_columns(fd); };
}

report::ConsoleOptions console_options(const Request& request, const plan::Config& config,
                                       const comm::World& world, const Environment& environment,
                                       const report::RunDirectory& run) {
  // The peak of bf16 says nothing about products in FP8.
  const bool bf16_gpu = world.device().is_cuda() && config.precision.compute == plan::Dtype::kBf16 &&
                        config.precision.fp8.recipe == plan::Fp8::kOff;
  report::ConsoleOptions options;
  options.total_steps = config.train.steps;
  options.log_every = config.train.log_every;
  options.ranks = world.size();
  options.reads_images = plan::reads_images(config.model.family);
  options.peak_flops = bf16_gpu ? kernels::bf16_peak_flops(kernels::gpus().front().name) : 0.0;
  options.json = request.json;
  options.quiet = request.quiet;
  options.run = run.path();
  options.ranks_asked = request.ranks;
  options.bar_columns = columns_behind(environment, "TRIREME_TTY_FD", -1);
  options.line_columns = columns_behind(environment, "TRIREME_OUT_TTY_FD", STDOUT_FILENO);
  return options;
}

/// Whoever preempted a run that can go on starts it again when it sees this code; a user who pressed Ctrl-C
/// does not.
int exit_code(const train::TrainResult& result, bool resumes) {
  if (result.stop_signal == 0) return 0;
  const bool before_its_checkpoint = resumes && result.summary.steps == 0;
  if ((result.resumable || before_its_checkpoint) && result.stop_signal != SIGINT)
    return static_cast<int>(ExitCode::kPreempted);
  return 128 + result.stop_signal;
}

comm::PeerOptions peer_options(const plan::CommConfig& config) {
  return {.share = config.peer_memory, .gather = config.gather};
}

/// A full disk costs the picture, not the run.
void show_pipeline(const plan::PipelineReport& report, const report::RunDirectory& run, bool announce) {
  const std::string folder = run.file("traces");
  if (announce)
    log_info("profile of one pipeline step:\n{}", report::to_text(report, terminal_columns(STDERR_FILENO)));
  try {
    report::write_pictures(report, folder, "pipeline");
    if (announce)
      log_info("profile in {0}/pipeline.svg; open {0}/pipeline.trace.json in Perfetto",
               report::as_typed(folder));
  } catch (const EnvironmentError& error) {
    log_warning("the picture of the pipeline was not written: {}", error.what());
  }
}

/// Nor does it cost a run on images.
void show_guesses(const Classification& guesses, const report::RunDirectory& run, bool announce) {
  try {
    report::write_classification(guesses, run);
    if (announce)
      log_info("pictures of the confusion matrix and the worst mistakes in {}",
               report::as_typed(run.file("pictures")));
  } catch (const EnvironmentError& error) {
    log_warning("pictures of the confusion matrix and the worst mistakes were not written: {}", error.what());
  }
}

}  // namespace

void beat_for_launcher(const Environment& environment, int64_t rank) {
  const auto descriptor = environment.get_int("TRIREME_FLIGHT_FD");
  if (!descriptor) return;
  static FlightRecord record =
      FlightRecord::open(static_cast<int>(*descriptor), rank);  // as long as the process
  count_beats_in(record.beats());
  beat();
}

void no_run_under_way() {
  for (const int number : {SIGTERM, SIGINT, SIGUSR1}) ::signal(number, SIG_DFL);
  if (!is_ignored(SIGHUP)) ::signal(SIGHUP, SIG_DFL);
}

void ask_to_stop(int signal) {
  int none = 0;
  stop_asked_at = milliseconds();  // a signal to all processes at once is this request, not a second one
  stop_signal.compare_exchange_strong(none, signal);
}

RankRun::RankRun(const Request& request, const Environment& environment, const plan::WorldSpec& spec,
                 const LinesOut& lines, const train::Program* program)
    : request_(request) {
  const plan::Config config =
      plan::load({.path = {}, .text = request.config, .overrides = {}}, Environment()).config;
  install_joining_handlers(request.resume);
  world_ = comm::World::join(spec, comm::take_device(config.device, spec), config.comm.timeout_s,
                             peer_options(config.comm));
  // Until here a signal ends the process at once: there is nothing to keep, or it is kept already.
  stop_signal = 0;
  install_signal_handlers(spec.launcher != "trireme" && spec.rank == 0);

  options_.config = config;
  options_.cache_dir = cache_dir(environment);
  options_.builtin_corpus = std::string(kTorchRoot) + "/include";
  options_.stop_signal = &stop_signal;
  options_.local_ranks = spec.ranks_here();
  options_.announce = !request.quiet && !request.silent;
  options_.resume = request.resume;
  options_.program = program;
  if (world_->rank() == 0) open_records(environment, lines);
  run_ = std::make_unique<train::Run>(options_, world_);
}

void RankRun::open_records(const Environment& environment, const LinesOut& lines) {
  const plan::Config& config = options_.config;
  next_.manifest = manifest_of(request_, environment, config, *world_);
  directory_ = run_directory(request_, config, next_.manifest);
  next_.attempt = attempt_at(*directory_, request_);
  options_.weights_path = directory_->file("checkpoints/final/model.safetensors");
  options_.best_weights_path = directory_->file("checkpoints/best/model.safetensors");
  options_.checkpoint_dir = directory_->file("checkpoints");
  options_.resume_from = request_.resume_from;
  options_.trace_path = directory_->file("traces/rank-0.json");
  options_.show_pipeline = [this](const plan::PipelineReport& report) {
    show_pipeline(report, *directory_, options_.announce);
  };
  options_.show_guesses = [this](const Classification& guesses) {
    show_guesses(guesses, *directory_, options_.announce);
  };
  sinks_.push_back(report::make_run_files_sink(*directory_, next_));
  sinks_.push_back(report::make_tensorboard_sink(*directory_));
  sinks_.push_back(report::make_curves_sink(*directory_, config.name));
  if (request_.finishes && options_.announce) log_info("run     {}", report::as_typed(directory_->path()));
  if (!request_.silent) {
    report::ConsoleOptions console = console_options(request_, config, *world_, environment, *directory_);
    console.write = lines;
    console.on_lost = [this] { output_lost_ = true; };
    if (lines) console.bar_columns = console.line_columns = {};
    sinks_.push_back(report::make_console_sink(console));
  }
  for (const auto& sink : sinks_) options_.sinks.push_back(sink.get());
}

int RankRun::finish() {
  const train::TrainResult result = run_->finish();
  const bool nothing_kept = result.stop_signal != 0 && result.summary.steps == 0;
  if (directory_ && request_.finishes && nothing_kept) log_info("stopped before the first step");
  const int code = exit_code(result, request_.resume);
  if (directory_ && request_.finishes) {
    directory_->begin_attempt(next_.attempt, next_.manifest);  // a signal may have come before the checkpoint
    directory_->finish(code);
  }
  // The run is whole, whatever was not told of it.
  return code == 0 && output_lost_ ? static_cast<int>(ExitCode::kEnvironment) : code;
}

}  // namespace trireme::cli
