#include "trireme/train/parts.h"

#include <ATen/ATen.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/kernels/matmul.h"
#include "trireme/nn/documents.h"
#include "trireme/plan/cuda_graphs.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/notes.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/monitor.h"
#include "trireme/train/prepare.h"

namespace trireme::train {

bool can_record(const plan::Config& config, const comm::World& world) {
  if (config.train.cuda_graphs == plan::CudaGraphs::kOff) return false;
  const int64_t ranks = plan::MeshShape::fit(config.parallel, world.size()).dp_size();
  const std::string obstacle = plan::cuda_graphs_obstacle(config, world.device().is_cuda(), ranks);
  const bool asked_for = config.train.cuda_graphs == plan::CudaGraphs::kOn;
  if (!obstacle.empty() && asked_for && world.rank() == 0) {
    log_warning("train.cuda_graphs=on has no effect: {}; training continues without them", obstacle);
  }
  return obstacle.empty();
}

namespace {

const Program& program_of(const TrainOptions& run) {
  static const Program kNone;
  return run.program != nullptr ? *run.program : kNone;
}

/// Checked before data is prepared, which may take long.
const TrainOptions& checked(const TrainOptions& run) {
  check_program(program_of(run), run.config);
  return run;
}

EarlyStop early_stop_of(const plan::Config& config, const RunData& data, const Program& program) {
  const Monitor monitor = monitor_of(config, data, program.metrics, "loss");
  return EarlyStop(config.train, monitor.metric, monitor.higher_is_better);
}

}  // namespace

Parts::Parts(const TrainOptions& run, std::shared_ptr<comm::World> joined, bool records)
    : options(checked(run)),
      config(run.config),
      world(std::move(joined)),
      mesh(comm::make_mesh(world, plan::MeshShape::fit(config.parallel, world->size()),
                           config.parallel.async_tp ? comm::GatherBy::kCopies : comm::GatherBy::kKernels)),
      batch(plan::plan_batch(config, mesh.shape)),
      facts(plan::describe(config.model, config.data.seq_len, config.precision, config.memory)),
      held(plan::describe(config.model, config.data.seq_len, config.precision, config.memory,
                          plan::tensor_split(mesh.shape, world->rank()))),
      data(prepare_data(run, mesh)),
      runs_on(begins_running_on(config)),
      validates(config.train.val_batches > 0 && data->val_samples() > 0),
      program(program_of(run)),
      early_stop(early_stop_of(config, *data, program)),
      records_passes(records) {
  check_early_stop();
  check_sample();
  at::manual_seed(
      static_cast<uint64_t>(config.seed + world->rank()));  // dropout; weights have their own source
  run_on(runs_on);
  if (is_root()) warn_of_data();
  open_feed(0);
  model = std::make_unique<TrainedModel>(
      ModelSetup{config, facts, held, batch, mesh, records_passes, &program.metrics});
}

void Parts::run_on(bool over_epochs) {
  runs_on = over_epochs;
  if (config.train.epochs == 0) return;
  config.train.steps = data->steps_for(config.train.epochs, feed_options());
  config.optim.warmup_steps = std::min(options.config.optim.warmup_steps, config.train.steps);
}

void Parts::warn_of_data() const {
  for (const std::string& note : data->notes()) log_warning("{}", note);
  const std::string why = config.train.val_batches > 0 ? data->why_no_validation() : "";
  if (!why.empty()) log_warning("validation is off: {}", why);
}

/// Only the data says whether enough of it is held out.
void Parts::check_early_stop() const {
  if (!early_stop.is_on() || validates) return;
  const std::string why = data->why_no_validation();
  throw ConfigError("[train.early_stop] train.early_stop={} ends a run by its validations, but {}",
                    config.train.early_stop, why.empty() ? "nothing is held out to validate on" : why);
}

/// Images make no text, which the config knows; data of a program may be tokens of no text.
void Parts::check_sample() const {
  if (config.train.sample_tokens == 0 || data->tokenizer() != nullptr) return;
  throw ConfigError(
      "[train.sample] train.sample_tokens={} asks for a text, but the data has no tokenizer; set it to 0",
      config.train.sample_tokens);
}

FeedOptions Parts::feed_options() const {
  return {.global_batch = batch.global_batch,
          .micro_batch = batch.micro_batch,
          .dp_rank = mesh.dp_rank,
          .dp_size = batch.dp_size,
          .tokens = plan::token_split(config, mesh.cp_rank),
          .runs_on = runs_on,
          .pin_memory = on_gpu()};
}

void Parts::open_feed(int64_t step) {
  next_batch = {};
  FeedOptions feed = feed_options();
  feed.first_step = step;
  next_batch = data->feed(feed);
}

bool Parts::epoch_ends_with(int64_t step) const {
  if (config.train.epochs == 0) return false;
  const auto epochs_in = [this](int64_t steps) { return samples_in(steps) / data->samples(); };
  return epochs_in(step) > epochs_in(step - 1);
}

namespace {

nn::AttentionBackend attention_of(const Parts& parts) {
  const plan::ModelConfig& model = parts.config.model;
  if (model.attention == plan::AttentionKind::kEager) return nn::AttentionBackend::kEager;
  const at::Device device = parts.world->device();
  const at::ScalarType dtype = dtype_of(parts.config.precision.compute);
  const int64_t head_dim = plan::head_dim(model);
  return parts.config.data.reset_attention
             ? nn::document_attention_backend(device, dtype, head_dim, model.dropout)
             : nn::attention_backend(device, dtype, parts.config.data.seq_len, head_dim, model.dropout);
}

bool has_attention(const Parts& parts) {
  return plan::record_of(parts.config.model.family).attends;
}

}  // namespace

std::string why_bits_vary(const Parts& parts) {
  const plan::Config& config = parts.config;
  if (config.train.deterministic) return {};
  if (parts.mesh.dp->size() > 1 && (config.comm.reduction == plan::Reduction::kBackend ||
                                    config.parallel.comm_hook == plan::CommHook::kPowerSgd)) {
    return "ranks' gradients are added in an order that NCCL or Gloo chooses";
  }
  if (parts.on_gpu() && plan::reads_images(config.model.family))
    return "convolutions (cuDNN) may add in an order that varies; train.deterministic=true fixes it";
  if (!parts.on_gpu() || !has_attention(parts) || nn::repeats_bits(attention_of(parts), config.data.seq_len))
    return {};
  return fmt::format(
      "the backward pass of attention ({}) adds in an order that varies; train.deterministic=true "
      "fixes it",
      nn::name(attention_of(parts)));
}

void announce(const Parts& parts) {
  const plan::Config& config = parts.config;
  const plan::BatchPlan& batch = parts.batch;
  if (!parts.options.announce || !parts.is_root()) return;
  const bool images = plan::reads_images(config.model.family);
  log_info("model   {} {}, {} parameters, {}FLOPs per {}", config.model.family,
           plan::preset_text(config.model, config.data.seq_len), with_commas(parts.facts.params),
           format_count(parts.facts.flops_per_token), images ? "image" : "token");
  log_info("data    {}", parts.data->description());
  log_info(
      "layout  {} on {}, policy {}, {} compute, global batch {} = micro batch {} x accumulation {} x {} "
      "ranks",
      parts.mesh.shape.to_string(), parts.world->device().str(), config.parallel.policy,
      config.precision.compute, batch.global_batch, batch.micro_batch, batch.accumulation, batch.dp_size);
  if (config.parallel.cp > 1) log_info("context attention along cp by {}", plan::settled_cp_kind(config));
  if (const plan::Fp8Config& fp8 = config.precision.fp8; fp8.recipe != plan::Fp8::kOff) {
    log_info("fp8     {}, gradients {}, fast sums {}, head in {}, blocks in bf16: {}", fp8.recipe,
             fp8.gradients, fp8.fast, fp8.head ? "fp8" : "bf16", plan::to_text(fp8.skip));
  }
  if (config.parallel.pp > 1) {
    const plan::PipelinePlan plan = plan::plan_pipeline(config, batch);
    log_info("stages  {} on {} ranks by {}, {} micro-batches{}", plan.schedule.stages, config.parallel.pp,
             plan.schedule.name, plan.schedule.micro_batches,
             plan.schedule.spread_head ? ", the head spread over all of them" : "");
  }
  if (has_attention(parts) && (parts.on_gpu() || attention_of(parts) == nn::AttentionBackend::kEager)) {
    log_info("kernels attention by {}, logits in parts of {} MiB", nn::name(attention_of(parts)),
             config.memory.loss_chunk_mib);
  }
  if (const std::string why = why_bits_vary(parts); !why.empty()) log_info("bits    may vary: {}", why);
  for (const std::string& note :
       plan::notes(parts.options.config, parts.on_gpu() ? plan::Device::kCuda : plan::Device::kCpu)) {
    log_info("note    {}", note);
  }
  if (const int64_t asked_for = parts.options.config.optim.warmup_steps;
      asked_for > config.optim.warmup_steps) {
    log_info("note    optim.warmup_steps={} is cut to the {} steps of train.epochs={}", asked_for,
             config.train.steps, config.train.epochs);
  }
  if (!parts.on_gpu() && config.precision.compute == plan::Dtype::kBf16 && !kernels::cpu_multiplies_bf16()) {
    log_info(
        "note    this processor has no instructions for bf16 (AVX512-BF16, AMX); "
        "precision.compute=fp32 would be faster");
  }
  if (parts.on_gpu() && parts.mesh.stage->size() > 1) {
    log_info("comm    {}", parts.model->symmetric_bytes() > 0
                               ? "GPUs read each other's memory, NCCL for the rest"
                               : "NCCL");
  }
}

}  // namespace trireme::train
