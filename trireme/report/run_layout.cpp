#include "trireme/report/run_layout.h"

#include <algorithm>
#include <filesystem>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config.h"
#include "trireme/plan/config_files.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"

namespace trireme::report {
namespace {

std::string batch_text(const plan::BatchPlan& batch) {
  return fmt::format("{} = micro-batch {} x accumulation {} x {} data-parallel rank{}", batch.global_batch,
                     batch.micro_batch, batch.accumulation, batch.dp_size, batch.dp_size == 1 ? "" : "s");
}

std::string model_text(const plan::Config& config, const plan::ModelFacts& facts) {
  const plan::ModelConfig& model = config.model;
  const bool images = plan::reads_images(model.family);
  const std::string shape = images ? fmt::format("{} blocks", model.n_layers)
                                   : fmt::format("{} layers of width {}", model.n_layers, model.d_model);
  const std::string preset = model.preset.empty() ? "" : " " + plan::preset_text(model, config.data.seq_len);
  return fmt::format("{}{}, {}, {} parameters, {} FLOPs {}", model.family, preset, shape,
                     with_commas(facts.params), format_count(facts.flops_per_token),
                     images ? "per image" : "per token");
}

std::string precision_text(const plan::Config& config) {
  return fmt::format("{} compute, gradients sent as {} and summed in {}{}", config.precision.compute,
                     plan::wire_dtype(config.precision), config.precision.accumulate,
                     plan::scales_loss(config.precision) ? ", loss scaled dynamically" : "");
}

std::string optimizer_text(const plan::Config& config) {
  return fmt::format("{}, {} schedule from lr {:g} to {:g}, {} warm-up steps, weight decay {:g}",
                     config.optim.name, config.optim.schedule, config.optim.lr, config.optim.min_lr,
                     config.optim.warmup_steps, config.optim.weight_decay);
}

std::string pipeline_words(const plan::Config& config, const plan::BatchPlan& batch) {
  const plan::PipelinePlan pipeline = plan::plan_pipeline(config, batch);
  return fmt::format("{}, {} stages, {} micro-batches", pipeline.schedule.name, pipeline.schedule.stages,
                     pipeline.schedule.micro_batches);
}

std::string data_words(const plan::Config& config) {
  const plan::VisionConfig& images = config.model.vision;
  if (plan::reads_images(config.model.family)) {
    return fmt::format("{}, images of {} x {} x {}, {} classes; an image counts as a token", config.data.path,
                       images.channels, images.image_size, images.image_size, images.classes);
  }
  const std::vector<plan::MixtureSource>& mixture = config.data.mixture.sources;
  std::vector<std::string> texts;
  for (const plan::MixtureSource& source : mixture)
    texts.push_back(fmt::format("{} ({}, weight {:g})", source.name, source.path, source.weight));
  return fmt::format("{}, {} tokens, sequences of {}",
                     mixture.empty() ? config.data.path : join(texts, " + "), config.data.tokenizer,
                     config.data.seq_len);
}

void describe_layout(const RunRecord& run, RunLayout& layout) {
  plan::Config config =
      plan::load({.path = "", .text = run.config_yaml, .overrides = {}}, Environment()).config;
  for (const plan::ConfigFile& file : plan::config_files()) {
    const std::string copy = run.path + "/" + file.kept_as;
    if (!file.path(config).empty() && std::filesystem::exists(copy)) file.path(config) = copy;
  }
  const int64_t ranks = std::max<int64_t>(1, run.facts.ranks);
  const auto device = run.facts.device == "cuda" ? plan::Device::kCuda : plan::Device::kCpu;
  const plan::MeshShape mesh = plan::MeshShape::fit(config.parallel, ranks);
  const plan::Policy policy = plan::resolve_policy(config.parallel, mesh);
  const plan::BatchPlan batch = plan::plan_batch(config, mesh);
  const plan::ModelFacts facts =
      plan::describe(config.model, config.data.seq_len, config.precision, config.memory);
  layout.rows.emplace_back("policy", fmt::format("{}: {}", policy.label(), policy.summary));
  layout.rows.emplace_back("global batch", batch_text(batch));
  if (config.parallel.pp > 1) layout.rows.emplace_back("pipeline", pipeline_words(config, batch));
  layout.rows.emplace_back("model", model_text(config, facts));
  layout.rows.emplace_back("precision", precision_text(config));
  layout.rows.emplace_back("optimizer", optimizer_text(config));
  layout.rows.emplace_back("data", data_words(config));
  layout.flops_per_token = facts.flops_per_token;
  const std::vector<plan::RankBytes> bytes = plan::bytes_by_pp_rank(config, ranks, device);
  layout.predicted = *std::ranges::max_element(bytes, {}, &plan::RankBytes::peak);
}

}  // namespace

RunLayout layout_of(const RunRecord& run) {
  RunLayout layout;
  if (run.facts.ranks > 0) {
    layout.rows.emplace_back(
        "ranks", fmt::format("{} on {}, mesh {}", run.facts.ranks, run.facts.device, run.facts.mesh));
  }
  if (run.config_yaml.empty()) {  // which would read as a config of defaults
    layout.problem = "there is no config.yaml";
    return layout;
  }
  try {
    describe_layout(run, layout);
  } catch (const Error& error) {
    layout.problem = error.what();
  }
  return layout;
}

}  // namespace trireme::report
