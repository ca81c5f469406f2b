#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/launch/local.h"
#include "trireme/plan/world.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

struct TrainOptions {
  std::string config;
  std::optional<int64_t> ranks;
  std::string run_dir;
  bool json = false;
  bool quiet = false;
  bool dry_run = false;
};

std::string runs_root(const TrainOptions& options, const Front& front) {
  return options.run_dir.empty() ? front.runs_root() : options.run_dir;
}

Request make_request(const TrainOptions& options, const Front& front, const plan::ResolvedConfig& resolved) {
  return {.verb = "train",
          .config = plan::to_yaml(resolved),
          .run_dir = "",
          .runs_root = runs_root(options, front),
          .command = front.command,
          .json = options.json,
          .quiet = options.quiet,
          .generate = {}};
}

/// Defaults of libtorch's own settings; a user's setting wins.
void prepare_torch(Environment& environment, const std::string& device) {
  // A lost peer makes c10d warn with stack traces; our own message says which rank was lost and when.
  if (!environment.get("TORCH_CPP_LOG_LEVEL")) environment.set("TORCH_CPP_LOG_LEVEL", "ERROR");
  if (device != "cuda") return;
  if (environment.get("PYTORCH_ALLOC_CONF") || environment.get("PYTORCH_CUDA_ALLOC_CONF")) return;
  // Segments that grow in place keep the CUDA allocator from fragmenting.
  environment.set("PYTORCH_ALLOC_CONF", "expandable_segments:True");
}

int print_plan(const RunPlan& run, const plan::Config& config, bool json) {
  fmt::print("{}", json ? to_json(run, config) + "\n" : to_text(run, config));
  return 0;
}

/// A launcher started this process as one of its ranks: check, then become that rank.
int join_world(const TrainOptions& options, Front& front, const plan::ResolvedConfig& resolved,
               const plan::WorldSpec& world) {
  if (options.ranks && *options.ranks != world.world_size) {
    throw ConfigError("[cli.train] -n {} against the {} ranks that {} started; drop -n", *options.ranks,
                      world.world_size, world.launcher);
  }
  const std::string& device = resolved.config.device;
  const std::string expected = device == "auto" ? (kHasCuda ? "cuda" : "cpu") : device;
  const RunPlan run = plan_run(resolved.config, expected, world.world_size);
  if (options.dry_run) return world.rank == 0 ? print_plan(run, resolved.config, options.json) : 0;
  prepare_torch(front.environment, expected);
  exec_worker(front.environment, make_request(options, front, resolved));
}

/// Runs the ranks and leaves their exit code in the manifest, whatever happens.
int run_ranks(const launch::LocalJob& job, const report::RunDirectory& directory) {
  int code = static_cast<int>(ExitCode::kFailed);
  try {
    code = launch::run_local(job);
  } catch (const Error& error) {
    directory.finish(static_cast<int>(error.exit_code()));
    throw;
  }
  directory.finish(code);
  return code;
}

int start_ranks(const TrainOptions& options, Front& front, const plan::ResolvedConfig& resolved,
                const RunPlan& run) {
  const std::string worker = worker_path();
  Request request = make_request(options, front, resolved);
  const auto directory = report::RunDirectory::create(request.runs_root, resolved.config.name,
                                                      {.command = front.command,
                                                       .config_yaml = request.config,
                                                       .device = run.device,
                                                       .mesh = run.mesh.to_string(),
                                                       .ranks = run.ranks});
  request.run_dir = directory.path();
  prepare_torch(front.environment, run.device);
  return run_ranks({.program = worker,
                    .args = {request.verb},
                    .ranks = run.ranks,
                    .environment = worker_environment(front.environment, request),
                    .log_dir = directory.file("logs")},
                   directory);
}

/// No launcher: this process is it.
int train_here(const TrainOptions& options, Front& front, plan::ResolvedConfig resolved) {
  plan::Config& config = resolved.config;
  const int gpus = config.device == "cpu" || !kHasCuda ? 0 : gpu_count();
  const std::string device = choose_device(config.device, gpus);
  if (config.device != device) {
    config.device = device;
    resolved.origins["device"] = "auto";
  }
  const RunPlan run = plan_run(config, device, choose_ranks(options.ranks, device, gpus));
  if (options.dry_run) return print_plan(run, config, options.json);
  return start_ranks(options, front, resolved, run);
}

int train(const TrainOptions& options, Front& front) {
  const plan::ConfigSources sources{.path = options.config, .text = "", .overrides = front.overrides};
  const plan::ResolvedConfig resolved = plan::load(sources, front.environment);
  const plan::WorldSpec world = plan::detect_world(front.environment);
  if (world.launcher != "none") return join_world(options, front, resolved, world);
  return train_here(options, front, resolved);
}

}  // namespace

void add_train(CLI::App& app, Front& front) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* verb = app.add_subcommand("train", "Train a model on all GPUs of this machine, or on CPU ranks");
  verb->add_option("CONFIG", options->config, "YAML file; none: defaults and overrides")->option_text(" ");
  verb->add_option("-n,--ranks", options->ranks, "Ranks to start here (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--run-dir", options->run_dir,
                   "Parent of run directories (default: $TRIREME_RUN_DIR, else ./runs)")
      ->option_text("DIR");
  verb->add_flag("--json", options->json, "One JSON object a step on stdout, the summary last");
  verb->add_flag("--quiet,-q", options->quiet, "No start-up lines and no progress bar");
  verb->add_flag("--dry-run", options->dry_run, "Print ranks, mesh, batch, model and memory; start nothing");
  verb->footer(
      "Any config key can be given as --section.key=value; 'trireme config keys' lists them.\n"
      "Under torchrun --no-python, srun or mpirun it joins the ranks that they start.\n"
      "Examples:\n"
      "  trireme train configs/quickstart.yaml --train.steps=50\n"
      "  trireme train -n 4 --model.preset=gpt-tiny --parallel.policy=zero2 --dry-run");
  verb->callback([options, &front] { front.action = [options, &front] { return train(*options, front); }; });
}

}  // namespace trireme::cli
