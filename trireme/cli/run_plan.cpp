#include "trireme/cli/run_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/words.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/notes.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::Device;

std::string batch_equation(const plan::BatchPlan& batch, bool reads_images) {
  return fmt::format("{} {} = {} micro-batch x {} accumulation x {} data-parallel ranks", batch.global_batch,
                     reads_images ? "images" : "sequences", batch.micro_batch, batch.accumulation,
                     batch.dp_size);
}

std::string state_text(const plan::StateBytes& state) {
  return fmt::format("{} per rank: parameters {}, gradients {}, optimizer {}", bytes_text(state.total()),
                     bytes_text(state.parameters), bytes_text(state.gradients), bytes_text(state.optimizer));
}

/// "1f1b, 2 stages of 3.5, 0.5 blocks, the last with the head, 8 micro-batches; estimated 88.9% busy".
std::string pipeline_text(const plan::PipelinePlan& plan, int64_t n_layers) {
  std::vector<std::string> blocks;
  for (int64_t stage = 0; stage < plan.schedule.stages; ++stage) {
    const plan::UnitRange range = plan::units_of_stage(plan.split, stage);
    const auto whole =
        static_cast<double>(std::min(range.end, n_layers + 1) - std::max<int64_t>(1, range.first));
    const double beyond = 0.5 * ((range.from_mlp ? 1.0 : 0.0) + (range.to_attention ? 1.0 : 0.0));
    blocks.push_back(fmt::format("{:g}", whole - beyond));
  }
  return fmt::format("{}, {} stages of {} blocks, {}, {} micro-batches; estimated {:.1f}% busy",
                     plan.schedule.name, plan.schedule.stages, join(blocks, ", "),
                     plan.schedule.spread_head ? "the head spread over all ranks" : "the last with the head",
                     plan.schedule.micro_batches,
                     100.0 * plan::simulate(plan.schedule, plan::work_of_passes(plan)).efficiency());
}

double estimated_step(const plan::PipelinePlan& plan) {
  return plan::simulate(plan.schedule, plan::work_of_passes(plan)).makespan;
}

/// The estimated effect of spreading the head; empty where it is not spread.
std::string spread_head_text(const RunPlan& run, plan::Config config) {
  if (!run.pipeline->schedule.spread_head) return {};
  config.pipeline.spread_head = false;
  config.train.step_program.clear();
  const double without = estimated_step(plan::plan_pipeline(config, run.batch));
  return fmt::format("; a step is estimated {:.2f} times as long as with the head in the last stage",
                     estimated_step(*run.pipeline) / without);
}

std::string peak_text(const plan::RankBytes& needed) {
  const plan::StepPeak& step = needed.step;
  std::vector<std::string> parts = {fmt::format("{} kept between steps", bytes_text(step.kept)),
                                    fmt::format("{} gathered or not yet reduced", bytes_text(step.gathered)),
                                    fmt::format("{} activations", bytes_text(step.activations))};
  const auto add = [&](int64_t bytes, std::string_view what) {
    if (bytes > 0) parts.push_back(fmt::format("{} {}", bytes_text(bytes), what));
  };
  add(step.boundaries, "received");
  add(step.for_loss, "for the loss");
  add(step.in_backward, "of a block that goes backward");
  add(step.decoded, "decoded weights");
  add(needed.pinned_copy == 0 ? needed.saved_copy : 0, "copied for a checkpoint");
  add(needed.exchanged, "that others read");
  add(needed.baseline, "for the process");
  return fmt::format("{} per rank: {}", bytes_text(needed.peak()), join(parts, ", "));
}

/// Notes on the sources of the config, and on the config that they made.
std::vector<std::string> all_notes(const RunPlan& run, const plan::Config& config) {
  std::vector<std::string> all = run.notes;
  const std::vector<std::string> of_config = plan::notes(config, run.device);
  all.insert(all.end(), of_config.begin(), of_config.end());
  return all;
}

/// How much is read; epochs of data that nobody has looked at yet are no number.
std::string data_text(const RunPlan& run, const plan::Config& config) {
  const int64_t step = run.batch.global_batch * config.data.seq_len;
  if (config.train.epochs > 0)
    return fmt::format("{} per step, {} epochs", with_commas(step), config.train.epochs);
  return fmt::format("{} per step, {} in {} steps", with_commas(step),
                     format_count(static_cast<double>(step) * static_cast<double>(config.train.steps)),
                     config.train.steps);
}

/// The rank that copies most for a checkpoint, which need not be the one that needs most memory.
const plan::RankBytes& largest_copy(const RunPlan& run) {
  return *std::ranges::max_element(run.by_pp_rank, {}, &plan::RankBytes::saved_copy);
}

/// "every 100 steps: 1.21 GiB per rank copied to 2.00 GiB of pinned host memory".
std::string copy_text(const plan::RankBytes& bytes, const plan::CheckpointConfig& config) {
  const std::string every =
      fmt::format("every {} steps: {} per rank copied to ", config.every, bytes_text(bytes.saved_copy));
  if (bytes.pinned_copy == 0) return every + "memory, which is kept for the next one";
  return every + fmt::format("{} of pinned host memory", bytes_text(bytes.pinned_copy));
}

/// The parts of the model that backward computes again; empty: none.
std::string recompute_text(const RunPlan& run, const plan::Config& config) {
  if (run.config.memory.recompute == plan::Recompute::kNone) return "";
  std::string text =
      plan::computes_blocks_again(run.config.memory.recompute) ? "whole blocks" : "norms and activations";
  if (run.config.memory.recompute == plan::Recompute::kAllButAttention) text += " but for attention";
  if (config.memory.recompute_every > 1)
    text += fmt::format(", in one of every {} blocks", config.memory.recompute_every);
  if (config.memory.recompute == plan::Recompute::kAuto)
    text +=
        fmt::format(" (memory.recompute=auto: about {:.1f}% of a step)", 100.0 * plan::cheap_cost(config));
  return text;
}

}  // namespace

plan::Device choose_device(plan::Device device, int gpus) {
  if (device == Device::kAuto) return kHasCuda && gpus > 0 ? Device::kCuda : Device::kCpu;
  if (device != Device::kCuda) return device;
  if (!kHasCuda) {
    throw EnvironmentError(
        "[cli.device] device is cuda but this build has no CUDA; build with -DTRIREME_CUDA=ON, or "
        "use --device=cpu");
  }
  if (gpus == 0) {
    throw EnvironmentError(
        "[cli.device] device is cuda but the driver shows no GPU; check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use --device=cpu");
  }
  return device;
}

int64_t choose_ranks(std::optional<int64_t> asked, plan::Device device, int gpus) {
  constexpr int64_t kCpuRanks = 2;
  if (!asked) return device == Device::kCuda ? gpus : kCpuRanks;
  if (*asked < 1) throw ConfigError("[cli.ranks] -n is {}, but must be 1 or more", *asked);
  if (device == Device::kCuda && *asked > gpus) {
    throw ConfigError("[cli.ranks] -n {} is more ranks than there are GPUs ({}); use -n {}, or --device=cpu",
                      *asked, gpus, gpus);
  }
  return *asked;
}

void check_device(const plan::Config& config, plan::Device device) {
  if (device != Device::kCpu || config.precision.compute != plan::Dtype::kFp16) return;
  throw ConfigError(
      "[cli.train] precision.compute=fp16 is not supported on the CPU, only fp32 and bf16 are; use bf16, "
      "or a GPU");
}

RunPlan plan_run(const plan::Config& given, plan::Device device, int64_t ranks, DeviceMemory there) {
  check_device(given, device);
  RunPlan run{.device = device,
              .ranks = ranks,
              .mesh = {},
              .batch = {},
              .facts = {},
              .held = {},
              .needed = {},
              .by_pp_rank = {},
              .pipeline = {},
              .there = there,
              .config = {},
              .notes = {}};
  run.mesh = plan::MeshShape::fit(given.parallel, ranks);
  run.batch = plan::plan_batch(given, run.mesh);
  run.config = plan::settle_recompute(plan::with_possible_fp8(given, device, run.batch), device);
  const plan::Config& config = run.config;
  run.facts = plan::describe(config.model, config.data.seq_len, config.precision, config.memory);
  run.held = plan::describe(config.model, config.data.seq_len, config.precision, config.memory,
                            plan::largest_split(config.parallel));
  if (config.parallel.pp > 1) run.pipeline = plan::plan_pipeline(config, run.batch);
  run.by_pp_rank = plan::bytes_by_pp_rank(config, ranks, device, run.pipeline.value_or(plan::PipelinePlan()));
  run.needed = *std::ranges::max_element(run.by_pp_rank, {}, &plan::RankBytes::peak);
  if (!config.train.step_program.empty()) {  // before ranks start
    plan::config_programs(config, run.held, run.batch,
                          plan::engine_setting(config, run.mesh, run.batch.accumulation, device));
  }
  return run;
}

std::string fit_text(const RunPlan& run, int64_t rank_bytes) {
  if (run.there.bytes == 0) return "";
  return fmt::format("{}: {} per rank x {} on {}", run.exceeds(rank_bytes) ? "does not fit" : "fits",
                     bytes_text(rank_bytes), run.there.ranks, bytes_text(run.there.bytes));
}

report::CostRow predicted_cost(const RunPlan& run, const plan::Policy& policy) {
  const plan::Config& config = run.config;
  plan::EngineSetting setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
  setting.policy = policy;
  const plan::StepProgram program = plan::config_program(config, run.held, run.batch, setting);
  const plan::RankBytes needed = plan::rank_bytes(config, run.held, run.batch, program, run.device);
  const plan::StateBytes& state = needed.state;
  report::CostRow row;
  row.policy = policy.label();
  row.cost.predicted = {state.parameters, state.gradients, state.optimizer};
  row.cost.predicted_wire_bytes = plan::sent_bytes(program, setting, run.batch.accumulation);
  row.cost.predicted_activation_bytes = needed.activations;
  row.cost.predicted_gathered_bytes = needed.gathered;
  row.cost.predicted_peak_bytes = needed.peak() - (run.device == Device::kCuda ? needed.baseline : 0);
  return row;
}

std::string to_text(const RunPlan& run, const plan::Config& config, int64_t columns) {
  report::Table table({{"plan"}, {config.name}});
  table.add_row({"ranks", fmt::format("{} on {}", run.ranks, run.device)});
  table.add_row({"mesh", run.mesh.to_string()});
  const plan::Policy policy = plan::resolve_policy(config.parallel, run.mesh);
  table.add_row({"policy", fmt::format("{}: {}", policy.label(), policy.summary)});
  const bool images = plan::reads_images(config.model.family);
  table.add_row({"batch", batch_equation(run.batch, images)});
  table.add_row({images ? "images" : "tokens", data_text(run, config)});
  table.add_row({"model", fmt::format("{} {}, {} parameters", config.model.family,
                                      plan::preset_text(config.model, config.data.seq_len),
                                      with_commas(run.facts.params))});
  table.add_row({"compute", fmt::format("{} FLOPs {}", format_count(run.facts.flops_per_token),
                                        images ? "per image" : "per token")});
  if (run.pipeline) {
    table.add_row(
        {"pipeline", pipeline_text(*run.pipeline, config.model.n_layers) + spread_head_text(run, config)});
    for (size_t rank = 0; rank < run.by_pp_rank.size(); ++rank) {
      const plan::RankBytes& bytes = run.by_pp_rank[rank];
      table.add_row(
          {fmt::format("pp rank {}", rank),
           fmt::format("model state {}; peak {}", bytes_text(bytes.state.total()), peak_text(bytes))});
    }
  } else {
    table.add_row({"model state", state_text(run.needed.state)});
    table.add_row({"peak", peak_text(run.needed)});
  }
  if (const std::string again = recompute_text(run, config); !again.empty())
    table.add_row({"recomputed", again});
  if (const plan::RankBytes& copy = largest_copy(run); copy.saved_copy > 0)
    table.add_row({"checkpoints", copy_text(copy, config.checkpoint)});
  if (const std::string fit = fit_text(run, run.needed.peak()); !fit.empty()) table.add_row({"memory", fit});
  for (const std::string& note : all_notes(run, config)) table.add_row({"note", note});
  return table.to_string(columns);
}

std::string to_json(const RunPlan& run, const plan::Config& config) {
  const Json batch = {{"global_batch", run.batch.global_batch},
                      {"micro_batch", run.batch.micro_batch},
                      {"accumulation", run.batch.accumulation},
                      {"dp_size", run.batch.dp_size}};
  const plan::StateBytes& held = run.needed.state;
  const Json state = {{"parameters", held.parameters},
                      {"gradients", held.gradients},
                      {"optimizer", held.optimizer},
                      {"total", held.total()}};
  const auto peak_of = [](const plan::RankBytes& bytes) {
    const plan::StepPeak& step = bytes.step;
    Json peak = {{"kept", step.kept},     {"gathered", step.gathered}, {"activations", step.activations},
                 {"loss", step.for_loss}, {"process", bytes.baseline}, {"total", bytes.peak()}};
    if (step.in_backward > 0) peak["in_backward"] = step.in_backward;
    if (step.decoded > 0) peak["decoded"] = step.decoded;
    if (bytes.exchanged > 0) peak["exchanged"] = bytes.exchanged;
    if (step.boundaries > 0) peak["boundaries"] = step.boundaries;
    if (bytes.saved_copy > 0) peak["checkpoint_copy"] = bytes.pinned_copy > 0 ? 0 : bytes.saved_copy;
    return peak;
  };
  const plan::RankBytes& most = largest_copy(run);
  const Json copy = {{"bytes", most.saved_copy},
                     {"host_bytes", std::max(most.saved_copy, most.pinned_copy)},
                     {"pinned", most.pinned_copy > 0}};
  Json pipeline;
  if (run.pipeline) {
    pipeline = {{"schedule", run.pipeline->schedule.name},
                {"stages", run.pipeline->schedule.stages},
                {"micro_batches", run.pipeline->schedule.micro_batches},
                {"first_part", run.pipeline->split.first},
                {"peak_bytes_by_pp_rank", Json::array()}};
    for (const plan::RankBytes& bytes : run.by_pp_rank)
      pipeline["peak_bytes_by_pp_rank"].push_back(peak_of(bytes));
  }
  const bool known = run.there.bytes > 0;
  const Json memory = {{"bytes", known ? Json(run.there.bytes) : Json()},
                       {"ranks_sharing", run.there.ranks},
                       {"fits", known ? Json(run.fits()) : Json()}};
  return Json{{"schema", "trireme.run-plan/2"},
              {"name", config.name},
              {"device", plan::name(run.device)},
              {"ranks", run.ranks},
              {"mesh", run.mesh.to_string()},
              {"policy", plan::name(config.parallel.policy)},
              {"batch", batch},
              {"steps", config.train.epochs == 0 ? Json(config.train.steps) : Json()},
              {"epochs", config.train.epochs > 0 ? Json(config.train.epochs) : Json()},
              {"tokens_per_step", run.batch.global_batch * config.data.seq_len},
              {"params", run.facts.params},
              {"flops_per_token", run.facts.flops_per_token},
              {"state_bytes_per_rank", state},
              {"peak_bytes_per_rank", peak_of(run.needed)},
              {"recompute", plan::name(run.config.memory.recompute)},
              {"checkpoint_copy_per_rank", copy},
              {"pipeline", pipeline},
              {"memory", memory},
              {"notes", all_notes(run, config)}}
      .dump(2);
}

}  // namespace trireme::cli
