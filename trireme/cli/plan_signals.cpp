#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>

#include "trireme/base/log.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/placement_view.h"
#include "trireme/cli/signals_view.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/memory.h"

namespace trireme::cli {
namespace {

struct SignalOptions {
  std::string file;
  TrainJob job;
  std::string gpu;
  std::optional<int64_t> worker;
  bool json = false;
};

bool gives(const std::vector<std::string>& overrides, std::string_view key) {
  return std::ranges::any_of(overrides, [key](const std::string& one) {
    return one.starts_with(key) && one.size() > key.size() && one[key.size()] == '=';
  });
}

/// The mini-GPT of GT's demo, whose layers are dealt evenly to the stages, where no config is given.
std::vector<std::string> demo_keys() {
  return {"name=mini-gpt", "model.preset=mini-gpt-153m", "train.global_batch=32", "train.micro_batch=4",
          "pipeline.split=even"};
}

/// The keys of the command line, then what the file says.
std::vector<std::string> overrides_for(const SignalOptions& options, const Front& front,
                                       const std::vector<std::string>& of_mesh) {
  std::vector<std::string> all = options.job.config.empty() ? demo_keys() : std::vector<std::string>();
  all.insert(all.end(), front.overrides.begin(), front.overrides.end());
  for (const std::string& key : of_mesh) {
    const bool given = key.starts_with("pipeline.schedule=") && gives(front.overrides, "pipeline.schedule");
    if (!given) all.push_back(key);
  }
  return all;
}

void check_overrides(const SignalOptions& options, const Front& front) {
  for (const char* key : {"parallel.tp", "parallel.pp"}) {
    if (!gives(front.overrides, key)) continue;
    throw UsageError(fmt::format("[cli.plan] --{} is what {} says", key, options.file),
                     "remove it, or change the file");
  }
}

/// The schedule must have its stages where the file has them.
void check_schedule(const plan::Signals& signals, const plan::Config& config, const RunPlan& run) {
  if (!run.pipeline) return;
  std::vector<int64_t> places;
  for (const plan::SignalStage& stage : signals.stages) places.push_back(stage.place);
  const plan::Schedule& schedule = run.pipeline->schedule;
  const bool two_ways = schedule.placement == plan::Placement::kTwoWays;
  if (!two_ways && !schedule.spread_head && schedule.ranks_of_stages() == places) return;
  throw ConfigError(
      "[cli.plan] pipeline.schedule={} does not have {} stages where the file of signals has them; remove "
      "it, "
      "or choose one that has: 1f1b for one stage a worker, zb_v for two there and back",
      config.pipeline.schedule, places.size());
}

/// The run on a mesh whose stages all have as many workers as the one at `place`.
PreparedJob prepared_for(const SignalOptions& options, const Front& front, const plan::Signals& signals,
                         int64_t tp) {
  TrainJob job = options.job;
  job.overrides = overrides_for(options, front, plan::config_keys(signals, tp));
  job.ranks = tp * std::ssize(signals.groups);
  PreparedJob prepared = plan_train_job(job, front, options.gpu);
  check_schedule(signals, prepared.config.config, prepared.plan);
  return prepared;
}

/// The share of worker `index` of a list.
SignalGroup group_of(const PreparedJob& job, const plan::Signals& signals, int64_t place, int64_t index) {
  const RunPlan& run = job.plan;
  const std::vector<int64_t>& workers = signals.groups[static_cast<size_t>(place)];
  const plan::Config& config = run.config;
  const auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
  const int64_t rank = place * std::ssize(workers) + index;
  std::vector<std::string> stages;
  for (int64_t stage = 0; stage < std::ssize(signals.stages) && run.pipeline; ++stage) {
    if (signals.stages[static_cast<size_t>(stage)].place == place) stages.push_back(stage_text(run, stage));
  }
  if (stages.empty()) stages.emplace_back("the whole model");
  return {.place = place,
          .worker = workers[static_cast<size_t>(index)],
          .stages = stages,
          .params = plan::held_parameters(config, run.mesh, run.pipeline.value_or(plan::PipelinePlan()),
                                          run.device, rank),
          .program = plan::config_program(config, run.held, run.batch, setting, place)};
}

/// The worker's place in its list, or that of the first one; none: it is in another list.
std::optional<int64_t> shown(const std::vector<int64_t>& workers, std::optional<int64_t> worker) {
  if (!worker) return 0;
  const auto found = std::ranges::find(workers, *worker);
  return found == workers.end() ? std::nullopt : std::optional<int64_t>(found - workers.begin());
}

SignalsView view_of(const SignalOptions& options, const Front& front) {
  SignalsView view{.file = options.file, .signals = plan::load_signals(options.file)};
  const plan::Signals& signals = view.signals;
  if (options.worker && (*options.worker < 0 || *options.worker >= signals.workers())) {
    throw ConfigError("[cli.plan] --worker {} is none of the {} workers of {}", *options.worker,
                      signals.workers(), options.file);
  }
  std::map<int64_t, PreparedJob> jobs;  // by workers of a stage, whose numbers differ in no mesh
  for (int64_t place = 0; place < std::ssize(signals.groups); ++place) {
    const std::vector<int64_t>& workers = signals.groups[static_cast<size_t>(place)];
    const std::optional<int64_t> index = shown(workers, options.worker);
    if (!index) continue;
    const int64_t tp = std::ssize(workers);
    auto job = jobs.find(tp);
    if (job == jobs.end()) job = jobs.emplace(tp, prepared_for(options, front, signals, tp)).first;
    view.groups.push_back(group_of(job->second, signals, place, *index));
  }
  if (jobs.empty()) return view;
  const PreparedJob& job = jobs.begin()->second;
  say_notes(job.config);
  view.model = fmt::format("{} (pipeline.split={})", job.config.config.name,
                           plan::to_text(job.config.config.pipeline.split));
  view.batch = job.plan.batch;
  view.seq_len = job.config.config.data.seq_len;
  if (plan::mesh_obstacle(signals).empty()) view.keys = plan::config_keys(signals, jobs.begin()->first);
  return view;
}

int show_signals(const SignalOptions& options, const Front& front) {
  check_overrides(options, front);
  const SignalsView view = view_of(options, front);
  for (const std::string& note : view.signals.notes) log_warning("{}", note);
  if (options.json) {
    fmt::print("{}\n", to_json(view).dump(2));
  } else {
    fmt::print("{}", to_text(view, terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

void add_plan_signals(CLI::App& plan, Front& front) {
  auto options = std::make_shared<SignalOptions>();
  CLI::App* verb = plan.add_subcommand(
      "signals", "Show what a file of signals makes of a model: who has which part, and what they send");
  verb->add_option("FILE", options->file, "YAML file of signals: names of scopes, and the workers of each")
      ->option_text(" ")
      ->required();
  verb->add_option("--config", options->job.config,
                   "YAML config file of the model (default: a GPT of 8 layers of 1024)")
      ->option_text("FILE");
  add_planned_gpu(*verb, options->gpu);
  verb->add_option("--worker", options->worker,
                   "Show the parameters of this worker (default: of the first of each stage)")
      ->option_text("W");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Any config key can be given as --section.key=value.\n"
      "Examples:\n"
      "  trireme plan signals configs/signals/tp2-pp4.yaml\n"
      "  trireme plan signals configs/signals/tp2-pp4.yaml --worker 3 --config "
      "configs/mini-gpt-tp2-pp4.yaml\n"
      "  trireme plan signals configs/signals/tp2-pp4.yaml --model.n_layers=16 --data.seq_len=64");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return show_signals(*options, front); }; });
}

}  // namespace trireme::cli
