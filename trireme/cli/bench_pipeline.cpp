#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/build_info.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

using plan::ScheduleName;

/// A dimension of the model on the command line, and its config key.
struct Dimension {
  const char* option;
  const char* key;
  int64_t usual;
  const char* help;
  std::optional<int64_t> given = {};
};

struct PipelineBenchOptions {
  std::optional<int64_t> ranks;
  std::string schedules = "gpipe,1f1b,interleaved_1f1b,zb_h1,interleaved_zb,zb_v,dualpipe_v";
  std::vector<Dimension> dimensions = {{"--layers", "model.n_layers", 8, "Blocks"},
                                       {"--dim", "model.d_model", 64, "Width"},
                                       {"--heads", "model.n_heads", 4, "Attention heads"},
                                       {"--kv-heads", "model.n_kv_heads", 2, "Key and value heads"},
                                       {"--ffn", "model.d_ff", 176, "Width inside the MLP"},
                                       {"--vocab", "model.vocab_size", 256, "Size of the vocabulary"},
                                       {"--seq", "data.seq_len", 32, "Tokens per sequence"}};
  BenchPipelineOptions run;
  bool json = false;
};

std::vector<std::string> schedules_of(const std::string& text) {
  std::vector<std::string> names = split(text, ',');
  for (const std::string& name : names) {
    if (plan::parse<ScheduleName>(name)) continue;
    if (name == "greedy") {
      throw UsageError(
          "[cli.bench] --schedules: 'greedy' is made for given costs, and is not measured",
          "'trireme pipeline show greedy --csv' writes it as a file that 'trireme train' takes as "
          "pipeline.file");
    }
    std::vector<std::string> known;
    for (const ScheduleName one : plan::all_values<ScheduleName>()) known.emplace_back(plan::name(one));
    throw UsageError(fmt::format("[cli.bench] --schedules: there is no schedule '{}'", name),
                     fmt::format("choose from {}", join(known, ", ")));
  }
  return names;
}

bool names_preset(const Front& front) {
  static constexpr std::string_view kKey = "model.preset=";
  const bool by_key = std::ranges::any_of(front.overrides, [](const std::string& text) {
    return text.starts_with(kKey) && text.size() > kKey.size();
  });
  return by_key || !front.environment.get("TRIREME__MODEL__PRESET").value_or("").empty();
}

/// Refuses models of images by the keys that name a model: others that the bench sets may not fit such a
/// model.
void refuse_images(const Front& front) {
  std::vector<std::string> names;
  std::ranges::copy_if(front.overrides, std::back_inserter(names), [](const std::string& text) {
    return text.starts_with("model.preset=") || text.starts_with("model.family=");
  });
  const auto named = plan::load({.path = "", .text = "", .overrides = names}, front.environment);
  if (!plan::reads_images(named.config.model.family)) return;
  throw ConfigError(
      "[cli.bench] model.family={} reads images, but the bench passes random tokens through stages; name a "
      "language model (model.preset, model.family)",
      named.config.model.family);
}

/// The user's keys win over those that the bench sets, and a preset over the bench's own model.
plan::ResolvedConfig config_of(const PipelineBenchOptions& options, const Front& front) {
  refuse_images(front);
  const bool has_preset = names_preset(front);
  std::vector<std::string> overrides = {"parallel.policy=ddp", "precision.compute=bf16"};
  if (!has_preset) {
    overrides.emplace_back("model.family=llama");
    overrides.emplace_back("model.tie_embeddings=false");
  }
  for (const Dimension& dimension : options.dimensions) {
    const bool of_model = std::string_view(dimension.key).starts_with("model.");
    if (has_preset && of_model && !dimension.given) continue;
    overrides.push_back(fmt::format("{}={}", dimension.key, dimension.given.value_or(dimension.usual)));
  }
  overrides.insert(overrides.end(), front.overrides.begin(), front.overrides.end());
  return plan::load({.path = "", .text = "", .overrides = overrides, .tokenizes = false}, front.environment);
}

void check_gpus(int64_t ranks, plan::Device device, int gpus) {
  if (device != plan::Device::kCuda || ranks <= gpus) return;
  throw ConfigError(
      "[cli.bench] {} ranks were requested, but this machine has {} GPUs; use -n {}, or --study {} to run "
      "the stages of {} ranks one after the other on one GPU",
      ranks, gpus, gpus, ranks, ranks);
}

int64_t ranks_of(const PipelineBenchOptions& options, plan::Device device, int gpus) {
  if (options.run.study == 0) {
    check_gpus(options.ranks.value_or(0), device, gpus);
    return choose_ranks(options.ranks, device, gpus);
  }
  if (options.ranks.value_or(1) != 1) {
    throw ConfigError("[cli.bench] --study {} puts all stages on one rank, but -n is {}; remove one of them",
                      options.run.study, *options.ranks);
  }
  return 1;
}

void check_ranks(const plan::ParallelConfig& parallel, int64_t ranks, bool study) {
  const int64_t replicas = parallel.dp_replicate * std::max<int64_t>(1, parallel.dp_shard);
  if (study && replicas == 1) return;
  if (ranks % replicas == 0 && ranks / replicas >= 2) return;
  throw ConfigError(
      "[cli.bench] a pipeline needs at least two ranks for each of {} data-parallel ranks "
      "(parallel.dp_replicate={} x parallel.dp_shard={}), but there are {}; set -n to a multiple of {} that "
      "is at least {}, or use --study P to run the stages of P ranks on one",
      replicas, parallel.dp_replicate, parallel.dp_shard, ranks, replicas, 2 * replicas);
}

int bench_pipeline(const PipelineBenchOptions& options, const Front& front) {
  const plan::ResolvedConfig config = config_of(options, front);
  const int gpus = kHasCuda && config.config.device != plan::Device::kCpu ? gpu_count() : 0;
  const plan::Device device = choose_device(config.config.device, gpus);
  const int64_t ranks = ranks_of(options, device, gpus);
  check_ranks(config.config.parallel, ranks, options.run.study > 0);
  if (!options.run.timeline.empty()) make_directories(options.run.timeline);
  Request request{.verb = "bench_pipeline",
                  .config = plan::to_yaml(config),
                  .run_dir = "",
                  .command = front.command,
                  .json = options.json};
  request.bench_pipeline = options.run;
  request.bench_pipeline.device = std::string(plan::name(device));
  request.bench_pipeline.schedules = schedules_of(options.schedules);
  return run_workers(request, front.environment, device, ranks);
}

void add_counts(CLI::App& verb, BenchPipelineOptions& run) {
  constexpr int64_t kMost = 4096;
  const auto add = [&](const char* option, int64_t& value, int64_t least, const char* help) {
    verb.add_option(option, value, with_default(help, value))
        ->option_text("N")
        ->check(CLI::Range(least, kMost));
  };
  add("--micro-batches", run.micro_batches, 1, "Micro-batches per step");
  add("--micro-batch-size", run.micro_batch_size, 1, "Sequences per micro-batch");
  add("--chunks", run.chunks, 1, "Stages per rank, for interleaved_1f1b, interleaved_zb and looped_bfs");
  add("--steps", run.steps, 1, "Measured steps; medians are shown");
  add("--warmup", run.warmup, 0, "Warm-up steps");
  verb.add_option("--study", run.study,
                  "Run the stages of N ranks on one device, one after the other, for study")
      ->option_text("N")
      ->check(CLI::Range(int64_t{2}, kMost));
}

}  // namespace

void add_bench_pipeline(CLI::App& bench, Front& front) {
  auto options = std::make_shared<PipelineBenchOptions>();
  CLI::App* verb = bench.add_subcommand("pipeline", "Measure the step time of pipeline schedules");
  verb->add_option("-n,--ranks", options->ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--schedules", options->schedules,
                   with_default("Separated by commas; 'trireme pipeline compare' lists them (all but greedy)",
                                options->schedules))
      ->option_text("LIST");
  for (Dimension& dimension : options->dimensions) {
    verb->add_option(dimension.option, dimension.given,
                     with_default(fmt::format("{} ({})", dimension.help, dimension.key), dimension.usual))
        ->option_text("N");
  }
  add_counts(*verb, options->run);
  verb->add_option("--timeline", options->run.timeline,
                   "Write the measured and the simulated step there: SCHEDULE.svg, and SCHEDULE.trace.json "
                   "for ui.perfetto.dev")
      ->option_text("DIR");
  verb->add_flag("--details", options->run.details,
                 "Print tables by rank and stage, and the step as text, for every schedule");
  verb->add_flag("--json", options->json, "Print one JSON document with all samples");
  verb->footer(
      "A Llama in bf16 on random tokens: forward and backward of a step, without the update. Config keys "
      "that\n"
      "apply, given as --section.key=value: device, seed, model.*, data.seq_len, parallel.*, memory.*, "
      "comm.*,\n"
      "pipeline.spread_head, and precision.compute, reduce and accumulate; others are refused.\n"
      "With --model.preset=NAME the model is that one, changed by the options and keys that are given.\n"
      "Example:\n"
      "  trireme bench pipeline -n 2 --schedules 1f1b,zb_v --micro-batches 16");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return bench_pipeline(*options, front); }; });
}

}  // namespace trireme::cli
