// trireme lab: small programs that run one thing in two ways and print both side by side.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/base/file.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/config.h"
#include "trireme/plan/schedule.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using plan::ScheduleName;

struct LabOptions {
  std::string name, mode = "both";
  std::optional<int64_t> ranks, micro_batches, micro_batch_size, window, depth;
  ToyPipelineOptions run;
  bool json = false;
};

/// A schedule, and the ranks that its name asks for.
struct Target {
  ScheduleName schedule;
  std::optional<int64_t> ranks;
};

/// "pipeline_1f1b"; also with what is around it elsewhere: "labs/train_distributed:1f1b_2stages",
/// "pipeline_1f1b.py".
Target target_of(const std::string& given) {
  std::string name =
      given.substr(given.find_last_of(":/") == std::string::npos ? 0 : given.find_last_of(":/") + 1);
  if (name.ends_with(".py")) name.resize(name.size() - 3);
  if (name.starts_with("pipeline_")) name.erase(0, 9);
  Target target{.schedule = ScheduleName::kGpipe, .ranks = {}};
  constexpr std::string_view kStages = "stages";
  const size_t line = name.rfind('_');
  if (line != std::string::npos && name.ends_with(kStages)) {
    int64_t count = 0;
    const char* const end = name.data() + name.size() - kStages.size();
    const auto [stop, error] = std::from_chars(name.data() + line + 1, end, count);
    if (error == std::errc() && stop == end) {
      target.ranks = count;
      name.resize(line);
    }
  }
  if (name == "dualpipev") name = "dualpipe_v";
  const auto schedule = plan::parse<ScheduleName>(name);
  if (!schedule) {
    throw UsageError(
        fmt::format("[cli.lab] there is no lab '{}'", given),
        "choose pipeline_gpipe, pipeline_1f1b, pipeline_dualpipe, pipeline_dualpipev, or "
        "pipeline_ with another schedule of 'trireme pipeline compare' but greedy; 'trireme lab' "
        "lists them");
  }
  target.schedule = *schedule;
  return target;
}

/// The fewest micro-batches that a schedule takes on these ranks.
int64_t fewest(ScheduleName schedule, int64_t ranks) {
  for (int64_t count = 1; count <= 4 * ranks; ++count) {
    try {
      plan::make_schedule(schedule, {ranks, count, 1});
      return count;
    } catch (const ConfigError&) {
      continue;
    }
  }
  plan::make_schedule(schedule, {ranks, 4 * ranks, 1});  // says why not
  return 4 * ranks;
}

/// The smallest divisor of `whole` that is at least `least`.
int64_t divisor(int64_t whole, int64_t least) {
  int64_t part = std::min(least, whole);
  while (whole % part != 0) ++part;
  return part;
}

/// The number of micro-batches by --micro-batches and --micro-batch-size, which must agree.
int64_t micro_batches_of(const LabOptions& options, int64_t usual) {
  const int64_t batch = options.run.batch_size;
  int64_t count = options.micro_batches.value_or(divisor(batch, usual));
  if (options.micro_batch_size) {
    if (options.micro_batches && *options.micro_batches * *options.micro_batch_size != batch) {
      throw ConfigError("[cli.lab] {} micro-batches of {} are not a batch of {}; remove one of the options",
                        *options.micro_batches, *options.micro_batch_size, batch);
    }
    count = batch / *options.micro_batch_size;
    if (count * *options.micro_batch_size != batch) {
      throw ConfigError("[cli.lab] micro-batches of {} do not divide a batch of {}; use a divisor",
                        *options.micro_batch_size, batch);
    }
  }
  if (count < 1 || batch % count != 0) {
    throw ConfigError("[cli.lab] {} micro-batches do not divide a batch of {}; use a divisor", count, batch);
  }
  return count;
}

/// Few micro-batches at a time and sends that block, or many and sends that do not.
std::vector<bench::ToyPipelineMode> modes_of(const LabOptions& options, ScheduleName schedule) {
  std::vector<bench::ToyPipelineMode> modes;
  const int64_t least =
      std::max(schedule == ScheduleName::kGpipe ? 1 : options.run.ranks, fewest(schedule, options.run.ranks));
  for (const bool optimized : {false, true}) {
    const std::string name = optimized ? "optimized" : "baseline";
    if (options.mode != "both" && options.mode != name) continue;
    const int64_t count = micro_batches_of(options, optimized ? std::max<int64_t>(8, 4 * least) : least);
    const int64_t window =
        std::min(count, options.window.value_or(optimized ? count : divisor(count, least)));
    plan::make_windowed_schedule(schedule, {options.run.ranks, count, 1}, window);
    modes.push_back({.name = name, .micro_batches = count, .window = window, .blocking = !optimized});
  }
  return modes;
}

/// The number of hidden layers: at least one for each stage but the last, whose layer goes back to the
/// features.
int64_t depth_of(const LabOptions& options, const plan::Schedule& schedule) {
  const int64_t least = schedule.stages - 1, usual = ToyPipelineOptions{}.depth;
  if (options.depth.value_or(least) >= least) return options.depth.value_or(std::max(usual, least));
  throw ConfigError(
      "[cli.lab] --depth {} makes {} layers, too few for the {} stages of {} on {} ranks; use --depth {} or "
      "more, or fewer ranks",
      *options.depth, *options.depth + 1, schedule.stages, schedule.name, options.run.ranks, least);
}

std::string name_of_lab(ScheduleName schedule) {
  return schedule == ScheduleName::kDualPipeV ? "pipeline_dualpipev" : fmt::format("pipeline_{}", schedule);
}

int list_labs(bool json) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  report::Table table({{"lab"}, {"what it pipelines with"}});
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    rows.push_back({{"name", name_of_lab(schedule)}, {"summary", plan::summary(schedule)}});
    table.add_row({name_of_lab(schedule), std::string(plan::summary(schedule))});
  }
  if (json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"schema", "trireme.labs/1"}, {"labs", rows}}.dump(2));
  } else {
    fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

int lab(LabOptions options, const Front& front) {
  if (options.name.empty()) return list_labs(options.json);
  const Target target = target_of(options.name);
  options.run.ranks = options.ranks.value_or(target.ranks.value_or(2));
  if (options.run.ranks < 2)
    throw ConfigError("[cli.lab] a pipeline needs at least two ranks, but -n is {}; use 2 or more",
                      options.run.ranks);
  const plan::ResolvedConfig config =
      plan::load({.path = "", .text = "", .overrides = front.overrides}, front.environment);
  const int gpus = kHasCuda && config.config.device != plan::Device::kCpu ? gpu_count() : 0;
  const plan::Device device = choose_device(config.config.device, gpus);
  if (!options.run.study && device == plan::Device::kCuda && options.run.ranks > gpus) {
    throw ConfigError(
        "[cli.lab] {} ranks were requested, but this machine has {} GPUs; use -n {}, or --study to run all "
        "stages one after the other on one GPU",
        options.run.ranks, gpus, gpus);
  }
  const int64_t ranks = options.run.study ? 1 : choose_ranks(options.run.ranks, device, gpus);
  options.run.schedule = std::string(plan::name(target.schedule));
  options.run.modes = modes_of(options, target.schedule);
  options.run.depth = depth_of(
      options,
      plan::make_schedule(target.schedule, {options.run.ranks, options.run.modes[0].micro_batches, 1}));
  options.run.device = std::string(plan::name(device));
  options.run.seed = config.config.seed;
  if (!options.run.timeline.empty()) make_directories(options.run.timeline);
  Request request{.verb = "toy_pipeline",
                  .config = plan::to_yaml(config),
                  .run_dir = "",
                  .command = front.command,
                  .json = options.json};
  request.toy_pipeline = options.run;
  return run_workers(request, front.environment, device, ranks);
}

}  // namespace

void add_lab(CLI::App& app, Front& front) {
  auto options = std::make_shared<LabOptions>();
  CLI::App* verb =
      app.add_subcommand("lab", "Compare a baseline and an optimized pipeline of an MLP, side by side");
  verb->add_option("NAME", options->name,
                   "pipeline_gpipe, pipeline_1f1b, pipeline_dualpipe, pipeline_dualpipev, or pipeline_ with "
                   "another schedule of 'trireme pipeline compare' but greedy; also as "
                   "labs/train_distributed:1f1b_2stages, which sets the ranks, too; without a name, all "
                   "labs are listed")
      ->option_text(" ");
  verb->add_option("--mode", options->mode, with_default("baseline, optimized or both", options->mode))
      ->check(CLI::IsMember({"baseline", "optimized", "both"}));
  const auto count = [&](const char* names, auto& value, const std::string& help) {
    verb->add_option(names, value, help)->option_text("N")->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  };
  count("-n,--ranks,--stages,--n-stages", options->ranks, "Ranks of the pipeline (default: 2)");
  count("--steps", options->run.steps, with_default("Measured steps", options->run.steps));
  count("--batch-size", options->run.batch_size, with_default("Rows per step", options->run.batch_size));
  count("--micro-batches,--micro-batch-target", options->micro_batches,
        "Micro-batches per step (default: the fewest that work; optimized: four times as many, at least 8)");
  count("--micro-batch-size", options->micro_batch_size, "Rows per micro-batch, instead of --micro-batches");
  count("--window,--dual-window", options->window,
        "Most micro-batches in flight, one window after another (default: the fewest that work; optimized: "
        "all)");
  count("--width,--hidden-dim", options->run.width,
        with_default("Width of the hidden layers", options->run.width));
  count("--depth", options->depth,
        fmt::format("Hidden layers (default: {}, or as many as the stages need)", options->run.depth));
  verb->add_option("--lr,--learning-rate", options->run.lr,
                   with_default("Learning rate of AdamW", options->run.lr))
      ->check(CLI::Range(0.0, 1.0));
  verb->add_flag("--study", options->run.study, "Run all stages on one device, one after the other");
  verb->add_option("--timeline", options->run.timeline, "Write baseline.svg, baseline.trace.json, ... here")
      ->option_text("DIR");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Trains an MLP on random numbers. baseline: few micro-batches and blocking sends; optimized: small\n"
      "micro-batches, non-blocking sends and deep windows. Both use the same weights, batches and learning "
      "rate.\n"
      "Config keys that apply: device, seed, comm.timeout_s, comm.peer_memory and comm.gather; others are "
      "refused.\n"
      "Examples:\n"
      "  trireme lab pipeline_gpipe --mode optimized --steps 4 --micro-batch-size 8 -n 2\n"
      "  trireme lab pipeline_dualpipe --steps 8 --dual-window 16");
  verb->callback([options, &front] { front.action = [options, &front] { return lab(*options, front); }; });
}

}  // namespace trireme::cli
