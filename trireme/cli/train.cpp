#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "trireme/base/build_info.h"
#include "trireme/base/log.h"
#include "trireme/base/streams.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/arguments.h"
#include "trireme/cli/child.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/dev_run.h"
#include "trireme/cli/drive_run.h"
#include "trireme/cli/front.h"
#include "trireme/cli/server_address.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/weights.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/world.h"
#include "trireme/report/cost_table.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

struct TrainArguments {
  TrainJob job;
  DeepSpeedOptions deepspeed;
  std::optional<int64_t> nodes;  ///< hosts, as DeepSpeed's launcher counts them; -n is then of each
  bool dry_run = false;
  std::string gpu;
  bool summary = false;
  std::optional<int64_t> profile;
  ServerAddress server;  ///< with TrainJob::controller
};

/// Throws OutOfMemory for a run that does not fit.
int print_plan(const RunPlan& run, const plan::Config& config, bool json) {
  fmt::print("{}",
             json ? to_json(run, config) + "\n" : to_text(run, config, terminal_columns(STDOUT_FILENO)));
  if (run.fits()) return 0;
  std::fflush(stdout);
  throw OutOfMemory("[cli.train] {}. {}", fit_text(run, run.needed.peak()),
                    plan::memory_advice(config, run.ranks, run.device));
}

/// A launcher started this process as one of its ranks: check, then become that rank.
int become_rank(TrainArguments options, Front& front, const plan::WorldSpec& world) {
  const int64_t nodes = options.nodes.value_or(1);
  if (options.job.ranks && *options.job.ranks * nodes != world.world_size) {
    throw ConfigError("[cli.train] -n {}{} contradicts the {} ranks that {} started; remove -n",
                      *options.job.ranks, nodes > 1 ? fmt::format(" on each of {} hosts", nodes) : "",
                      world.world_size, plan::launcher_in_words(world.launcher));
  }
  if (options.summary) {
    throw ConfigError(
        "[cli.train] --summary works only with Trireme's own launcher, but these ranks were started by {}; "
        "read "
        "summary.json",
        plan::launcher_in_words(world.launcher));
  }
  if (!options.gpu.empty()) {
    throw ConfigError(
        "[cli.train] --gpu {} plans for GPUs that are elsewhere, but these ranks were started here by {}; "
        "remove "
        "it",
        options.gpu, plan::launcher_in_words(world.launcher));
  }
  if (options.job.controller) {
    throw ConfigError(
        "[cli.train] --controller drives workers that this command starts or 'trireme serve' has, but these "
        "ranks were started by {}; remove it",
        plan::launcher_in_words(world.launcher));
  }
  if (options.job.restarts.most > 0) {
    throw ConfigError(
        "[cli.train] --max-restarts works only for ranks that this command starts, but these were started by "
        "{}; use its own restart option, and pass --resume to this command so that training continues",
        plan::launcher_in_words(world.launcher));
  }
  const std::optional<ResumePoint> resume = find_resume_point(options.job, front);
  plan::ResolvedConfig resolved = load_config(options.job, front, world.world_size);
  refuse_dev_run(resolved.config);
  settle_data_path(resolved.config, options.job.config);
  settle_tokenizer(resolved, options.job.config);
  settle_kept_files(resolved, options.job.config);
  settle_weights_path(resolved.config, runs_root(options.job, front));
  check_weights(resume, resolved.config);
  if (resume && !resume->why_new.empty() && world.rank == 0)
    log_info("resume  starts a new run, {}", resume->why_new);
  using plan::Device;
  const Device device = resolved.config.device;
  const Device expected = device != Device::kAuto ? device : kHasCuda ? Device::kCuda : Device::kCpu;
  RunPlan run =
      plan_run(resolved.config, expected, world.world_size, memory_for(expected, world.ranks_here()));
  run.notes = resolved.notes;
  if (options.dry_run) return world.rank == 0 ? print_plan(run, resolved.config, options.job.json) : 0;
  check_memory(run, resolved.config);
  check_program_data(resolved.config, front.environment);
  if (world.rank == 0 && !options.job.quiet) say_notes(resolved);
  prepare_torch(front.environment, expected);
  exec_worker(front.environment, train_request(options.job, front, resolved, resume));
}

/// Ranks of one host see the same files and variables, so they refuse them alike: the first one says why.
int join_world(const TrainArguments& options, Front& front, const plan::WorldSpec& world) {
  try {
    return become_rank(options, front, world);
  } catch (const ConfigError&) {
    if (world.local_rank == 0) throw;
    return static_cast<int>(ExitCode::kUsage);
  } catch (const EnvironmentError&) {
    if (world.local_rank == 0) throw;
    return static_cast<int>(ExitCode::kEnvironment);
  } catch (const OutOfMemory&) {
    if (world.local_rank == 0) throw;
    return static_cast<int>(ExitCode::kOutOfMemory);
  }
}

/// The predicted costs of the other policies for this run, beside those of its own, in at most `columns`.
std::string summary_of(const FinishedJob& finished, int64_t columns) {
  const PreparedJob& prepared = finished.prepared;
  const plan::Config& config = prepared.config.config;
  const std::string chosen = plan::resolve_policy(config.parallel, prepared.plan.mesh).label();
  std::vector<report::CostRow> rows;
  for (const plan::Policy& policy : plan::policies()) {
    const std::string label = policy.label();
    if (label == chosen) {
      rows.push_back(report::read_cost(finished.run_directory, label));
    } else if (!policy.hybrid) {
      rows.push_back(predicted_cost(prepared.plan, policy));
    }
  }
  return report::cost_table(rows, columns);
}

std::string would_start(const ResumePoint& resume) {
  return fmt::format("would start a new run{}{}", resume.why_new.empty() ? "" : ", ", resume.why_new);
}

/// Prints the plan of a run, or with --resume of its continuation, and starts nothing.
int dry_run(TrainJob job, const std::string& gpu, const Front& front) {
  const std::optional<ResumePoint> resume = find_resume_point(job, front);
  const PreparedJob prepared = plan_train_job(job, front, gpu);
  check_weights(resume, prepared.config.config);
  if (resume && !job.quiet) {
    const std::string& run = resume->run_directory;
    const std::string ranks =
        run.empty() ? "" : changed_ranks(report::RunDirectory::open(run), prepared.plan.ranks);
    log_info("resume  {}{}{}", run.empty() ? would_start(*resume) : "would continue " + report::as_typed(run),
             ranks.empty() ? "" : " ", ranks);
  }
  return print_plan(prepared.plan, prepared.config.config, job.json);
}

/// An empty word is the variable that a job's script did not set: it must not begin a run anew.
void check_resume_word(const TrainJob& job, bool given) {
  if (!given || !job.resume.empty()) return;
  throw UsageError(
      "[cli.train] --resume has an empty value",
      "write --resume=auto, a run or a checkpoint; in a script, check the variable that sets it");
}

/// The run is for the workers that the server has.
void use_workers_of_server(TrainJob& job, const Front& front) {
  const ServerWorkers there = workers_of_server(*job.server, front.environment);
  if (job.ranks.value_or(there.count) != there.count) {
    throw ConfigError("[cli.train] -n {}, but the server at {} has {} workers; remove -n", *job.ranks,
                      job.server->text(), there.count);
  }
  if (job.restarts.most > 0) {
    throw ConfigError(
        "[cli.train] --max-restarts {} with the workers at {}: this command cannot start them again; remove "
        "it, and use --resume once they are back",
        job.restarts.most, job.server->text());
  }
  job.ranks = there.count;
  using plan::Device;
  const Device wanted = load_config(job, front, there.count).config.device;
  if (wanted != Device::kAuto && wanted != (there.on_gpus ? Device::kCuda : Device::kCpu)) {
    throw ConfigError("[cli.train] device is {}, but the workers at {} compute on {}; set device to auto",
                      plan::name(wanted), job.server->text(), there.on_gpus ? "GPUs" : "the CPU");
  }
  job.overrides.push_back(there.on_gpus ? "device=cuda" : "device=cpu");
}

int train(TrainArguments options, Front& front) {
  const plan::WorldSpec world = plan::detect_world(front.environment);
  if (world.launcher != "none") return join_world(options, front, world);
  if (options.job.server) use_workers_of_server(options.job, front);
  if (options.nodes.value_or(1) > 1) {
    throw ConfigError(
        "[cli.train] --num_nodes {}: this command starts ranks of its own host only; start it with torchrun "
        "--no-python, srun or mpirun on all of them (docs/guide/many_hosts.md)",
        *options.nodes);
  }
  const std::optional<DevRun> dev = dev_run_of(options.job, front);
  if (options.dry_run) return dry_run(dev ? dev->job : options.job, options.gpu, front);
  const FinishedJob finished = dev ? run_dev_run(*dev, front) : run_train_job(options.job, front);
  if (!options.summary || finished.code != 0) return finished.code;
  if (options.job.json) {
    write_stderr(summary_of(finished, terminal_columns(STDERR_FILENO)));  // stdout is for JSON alone
  } else {
    fmt::print("{}", summary_of(finished, terminal_columns(STDOUT_FILENO)));
  }
  return finished.code;
}

}  // namespace

void add_train(CLI::App& app, Front& front) {
  auto options = std::make_shared<TrainArguments>();
  CLI::App* verb = app.add_subcommand("train", "Train a model on all GPUs of this machine, or on CPU ranks");
  add_config_file(*verb, options->job.config);
  CLI::Option* const deepspeed = add_deepspeed(*verb, options->deepspeed);
  verb->add_option("-n,--ranks,--num_gpus", options->job.ranks,
                   "Ranks to start here (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option(
          "--num_nodes", options->nodes,
          "Hosts, as DeepSpeed's launcher counts them; above 1 torchrun, srun or mpirun must start the "
          "ranks")
      ->option_text("HOSTS")
      ->check(CLI::Range(1, 1'000'000));
  verb->add_option("--run-dir", options->job.run_dir,
                   "Parent of run directories (default: $TRIREME_RUN_DIR, else ./runs)")
      ->option_text("DIR");
  CLI::Option* const resume =
      verb->add_option("--resume", options->job.resume,
                       "Continue a run: auto (the default: the newest run of this name unless it has "
                       "finished, else a new one), latest, RUN or a checkpoint");
  resume->option_text("[WHAT]")->expected(0, 1)->default_str("auto");
  verb->add_option("--max-restarts", options->job.restarts.most,
                   "If a rank dies, hangs or loses its peers, restart all ranks from the newest checkpoint, "
                   "at most N times without a new checkpoint in between (default: 0)")
      ->option_text("N")
      ->check(CLI::Range(0, 1'000'000));
  verb->add_option("--restart-delay", options->job.restarts.first_delay_s,
                   "Seconds before the first restart (default: 1); doubled for each further one, up to 60")
      ->option_text("SECONDS")
      ->check(CLI::Range(0.0, 3600.0));
  verb->add_flag(
      "--json", options->job.json,
      "Print one JSON object per step on stdout (type step), and last the summary (type summary) with "
      "its run");
  verb->add_flag("--quiet,-q", options->job.quiet, "Print no start-up information and no progress bar");
  CLI::Option* const controller =
      verb->add_flag("--controller", options->job.controller,
                     "Drive workers step by step from this process: its own, or with -p, --socket or --host "
                     "those of 'trireme serve'; weights are those without it");
  const std::vector<CLI::Option*> server = add_server_address(*verb, options->server);
  for (CLI::Option* const option : server) option->needs(controller);
  CLI::Option* const dry_run =
      verb->add_flag("--dry-run", options->dry_run,
                     "Print ranks, mesh, batch, pipeline stages, model and memory without starting anything; "
                     "exit code 4 if it does not fit");
  add_planned_gpu(*verb, options->gpu)->needs(dry_run);
  verb->add_flag("--summary", options->summary,
                 "Print a table at the end: bytes held and sent, predicted and measured, beside the other "
                 "policies; with "
                 "--json on stderr");
  verb->add_option("--profile", options->profile,
                   "Profile this many steps and show where GPU time goes (train.profile_steps)")
      ->option_text("STEPS");
  verb->footer(
      "Any config key can be given as --section.key=value; 'trireme config keys' lists them.\n"
      "Under torchrun --no-python, srun or mpirun, it joins the ranks that those start.\n"
      "Examples:\n"
      "  trireme train configs/quickstart.yaml --train.steps=50\n"
      "  trireme train configs/llama-8b.yaml --train.fast_dev_run=3\n"
      "  trireme train configs/quickstart.yaml --checkpoint.every=100 --max-restarts 3\n"
      "  trireme train -n 4 --model.preset=gpt-tiny --parallel.policy=zero2 --dry-run\n"
      "  trireme train configs/llama-8b.yaml -n 64 --dry-run --gpu h100\n"
      "  trireme train configs/pipeline.yaml --pipeline.schedule=zb_v\n"
      "  trireme train configs/quickstart.yaml --controller -p 12345\n"
      "  trireme train configs/quickstart.yaml --deepspeed_config configs/deepspeed/zero2_config.json");
  verb->callback([options, resume, deepspeed, server, &front] {
    front.action = [options, resume, deepspeed, server, &front] {
      const auto is_given = [](const CLI::Option* option) { return option->count() > 0; };
      if (std::ranges::any_of(server, is_given)) options->job.server = options->server.address();
      options->server.files.put_into(front.environment);
      check_resume_word(options->job, resume->count() > 0);
      options->job.deepspeed =
          deepspeed_file(options->deepspeed, deepspeed->count() > 0, options->job.config);
      options->job.overrides = front.overrides;
      if (options->profile) {
        options->job.overrides.push_back(fmt::format("train.profile_steps={}", *options->profile));
      }
      return train(*options, front);
    };
  });
}

}  // namespace trireme::cli
