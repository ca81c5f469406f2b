#include <csignal>

#include <atomic>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/config.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/world.h"
#include "trireme/report/console.h"
#include "trireme/report/run_dir.h"
#include "trireme/train/trainer.h"

namespace trireme::cli {
namespace {

std::atomic<int> stop_signal{0};

extern "C" void remember_signal(int number) {
  stop_signal = number;
}

/// SIGINT and SIGTERM end the run with its weights written (train::TrainOptions::stop_signal); a second
/// SIGINT ends the process at once.
void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = remember_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  action.sa_flags |= static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

report::RunDirectory run_directory(const Request& request, const plan::Config& config,
                                   const comm::World& world) {
  if (!request.run_dir.empty()) return report::RunDirectory::open(request.run_dir);
  return report::RunDirectory::create(
      request.runs_root, config.name,
      {.command = request.command,
       .config_yaml = request.config,
       .device = world.device().is_cuda() ? "cuda" : "cpu",
       .mesh = plan::MeshShape::fit(config.parallel, world.size()).to_string(),
       .ranks = world.size()});
}

report::ConsoleOptions console_options(const Request& request, const plan::Config& config,
                                       const comm::World& world, const Environment& environment) {
  const plan::ModelFacts facts =
      plan::describe(config.model, config.data.seq_len, config.precision, config.memory);
  const bool bf16_gpu = world.device().is_cuda() && config.precision.compute == plan::Dtype::kBf16;
  report::ConsoleOptions options;
  options.total_steps = config.train.steps;
  options.log_every = config.train.log_every;
  options.ranks = world.size();
  options.flops_per_token = facts.flops_per_token;
  options.peak_flops = bf16_gpu ? kernels::bf16_peak_flops(kernels::gpus().front().name) : 0.0;
  options.json = request.json;
  options.quiet = request.quiet;
  options.tty_columns = environment.get_int("TRIREME_TTY_COLUMNS").value_or(0);
  return options;
}

comm::PeerOptions peer_options(const plan::CommConfig& config) {
  return {.share = config.peer_memory, .gather = config.gather};
}

}  // namespace

int worker_train(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  if (spec.rank > 0) {
    if (spec.launcher != "trireme") set_log_prefix(fmt::format("[r{}] ", spec.rank));
  }
  const plan::Config config =
      plan::load({.path = {}, .text = request.config, .overrides = {}}, Environment()).config;
  const auto world = comm::World::join(spec, comm::take_device(config.device, spec), config.comm.timeout_s,
                                       peer_options(config.comm));
  // Until here a signal ends the process at once: there is nothing to keep.
  install_signal_handlers();

  train::TrainOptions options;
  options.config = config;
  options.cache_dir = cache_dir(environment);
  options.builtin_corpus = std::string(kTorchRoot) + "/include";
  options.stop_signal = &stop_signal;
  options.local_ranks = spec.local_world_size;
  options.announce = !request.quiet && !request.silent;
  std::optional<report::RunDirectory> run;
  std::vector<std::unique_ptr<Sink>> sinks;
  if (world->rank() == 0) {
    run = run_directory(request, config, *world);
    options.weights_path = run->file("checkpoints/final/model.safetensors");
    options.trace_path = run->file("traces/rank-0.json");
    sinks.push_back(report::make_run_files_sink(*run));
    sinks.push_back(report::make_tensorboard_sink(*run));
    if (!request.silent)
      sinks.push_back(report::make_console_sink(console_options(request, config, *world, environment)));
    for (const auto& sink : sinks) options.sinks.push_back(sink.get());
  }
  const train::TrainResult result = train::train(options, world);
  const int code = result.stop_signal == 0 ? 0 : 128 + result.stop_signal;
  if (run && request.run_dir.empty()) run->finish(code);
  return code;
}

}  // namespace trireme::cli
