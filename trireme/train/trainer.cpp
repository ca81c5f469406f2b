#include "trireme/train/trainer.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/data/corpus.h"
#include "trireme/data/loader.h"
#include "trireme/data/tokenizer.h"
#include "trireme/kernels/device.h"
#include "trireme/memory/recompute.h"
#include "trireme/nn/attention.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/optim/learning_rate.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_facts.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/generate.h"
#include "trireme/train/profile.h"
#include "trireme/train/validate.h"
#include "trireme/train/weights.h"

namespace trireme::train {
namespace {

/// Overflows in a row after which a smaller loss scale will not help either.
constexpr int64_t kMostOverflowsInARow = 64;
/// Steps at the start of a run that tokens/s leaves out of its median.
constexpr int64_t kWarmupSteps = 10;

nn::BlockForward again_in_backward(const nn::BlockForward& forward) {
  return [forward](const at::Tensor& x) { return memory::recomputed(x, forward); };
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

precision::LossScaler make_scaler(const plan::PrecisionConfig& config) {
  const bool automatic = config.scaling == "auto" && config.compute == "fp16";
  return {config.loss_scale, automatic || config.scaling == "dynamic"};
}

/// What one step gave, summed or maximised over the ranks.
struct StepTotals {
  double loss = 0.0;
  double grad_norm = 0.0;
  double peak_bytes = 0.0;
  double reserved_bytes = 0.0;
  int stop_signal = 0;
};

/// A tensor on its way from the current stream of a GPU to the host.
class HostCopy {
 public:
  explicit HostCopy(const at::Tensor& tensor)
      : host_(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true))),
        arrived_(tensor.device().type()) {
    host_.copy_(tensor, /*non_blocking=*/true);
    arrived_.record(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
  }
  const at::Tensor& wait() {
    arrived_.synchronize();
    return host_;
  }

 private:
  at::Tensor host_;
  c10::Event arrived_;
};

class Trainer {
 public:
  Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world);
  TrainResult run();

 private:
  data::PreparedCorpus prepare_data() const;
  bool recomputes(const std::string& unit) const;
  void announce() const;
  at::Tensor forward_backward();
  at::Tensor gather_totals(const at::Tensor& loss_sum) const;
  StepTotals read_totals(const at::Tensor& rows) const;
  void check_finite(int64_t step) const;
  void update_at_once(int64_t step, const at::Tensor& totals, double lr);
  bool update_if_finite(int64_t step, const at::Tensor& totals, double lr);
  void check_groups() const;
  std::string where_not_finite() const;
  void report_overflow(int64_t step, double scale) const;
  StepRecord step(int64_t index);
  RunCost cost() const;
  bool validates_at(int64_t step) const;
  double validate();
  std::string sample();
  void finish(TrainResult& result, double started, const std::vector<double>& speeds);
  bool is_root() const { return world_->rank() == 0; }

  const TrainOptions& options_;
  const plan::Config& config_;
  std::shared_ptr<comm::World> world_;
  comm::Mesh mesh_;
  plan::BatchPlan batch_;
  plan::ModelFacts facts_;
  data::PreparedCorpus corpus_;
  std::shared_ptr<data::Dataset> train_data_, val_data_;
  std::shared_ptr<nn::LanguageModel> model_;
  std::unique_ptr<parallel::DataParallel> engine_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<data::Loader> loader_;
  precision::LossScaler scaler_;
  StepTotals last_;
  parallel::LaneTimes step_times_;  ///< of the last step
  int64_t step_wire_bytes_ = 0;     ///< sent by this rank in the last step
};

Trainer::Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world)
    : options_(options),
      config_(options.config),
      world_(std::move(world)),
      mesh_(comm::make_mesh(world_, plan::MeshShape::fit(config_.parallel, world_->size()))),
      batch_(plan::plan_batch(config_.train.global_batch, config_.train.micro_batch, mesh_.shape.dp_size())),
      facts_(plan::describe(config_.model, config_.data.seq_len, config_.precision, config_.memory)),
      corpus_(prepare_data()),
      scaler_(make_scaler(config_.precision)) {
  at::manual_seed(
      static_cast<uint64_t>(config_.seed + mesh_.dp_rank));  // dropout; weights have their own source
  train_data_ = std::make_shared<data::Dataset>(corpus_.folder, "train", config_.data.seq_len);
  if (config_.train.val_batches > 0 && corpus_.val_tokens > config_.data.seq_len) {
    val_data_ = std::make_shared<data::Dataset>(corpus_.folder, "val", config_.data.seq_len);
  }
  model_ = nn::build(config_.model);
  const auto initializer = [this](const std::string& name, int64_t first, std::span<float> out) {
    nn::initial_values(config_.model, static_cast<uint64_t>(config_.seed), name, first, out);
  };
  const parallel::Options options_of_engine = engine_options(config_, mesh_);
  const bool buckets = config_.parallel.bucket_mib > 0.0;
  engine_ = std::make_unique<parallel::DataParallel>(
      *model_, plan::engine_units(config_, facts_), mesh_, options_of_engine, initializer,
      buckets ? parallel::UseFrom::kBuckets : parallel::UseFrom::kRunUnit);
  model_->set_unit_runner(
      [this](const std::string& unit, const at::Tensor& x, const nn::BlockForward& forward) {
        return engine_->run_unit(unit, x, recomputes(unit) ? again_in_backward(forward) : forward);
      });
  if (config_.memory.recompute == "cheap") model_->recompute_cheap(config_.memory.recompute_every);
  optimizer_ = optim::build(config_.optim, engine_->optimizer_params());
  loader_ = std::make_unique<data::Loader>(
      train_data_, data::LoaderOptions{.sampler = {.samples = train_data_->size(),
                                                   .seed = static_cast<uint64_t>(config_.seed)},
                                       .global_batch = batch_.global_batch,
                                       .micro_batch = batch_.micro_batch,
                                       .dp_rank = mesh_.dp_rank,
                                       .dp_size = batch_.dp_size,
                                       .pin_memory = world_->device().is_cuda()});
}

/// Whether backward computes the block again.
bool Trainer::recomputes(const std::string& unit) const {
  if (config_.memory.recompute != "block") return false;
  const auto found = std::ranges::find(facts_.units, unit, &plan::UnitSpec::name);
  const auto block = std::distance(facts_.units.begin(), found) - 1;  // the root comes first
  return block % config_.memory.recompute_every == 0;
}

/// Rank 0 prepares while the others wait, then all open the same folder.
data::PreparedCorpus Trainer::prepare_data() const {
  const data::CorpusOptions options{.path = config_.data.path,
                                    .builtin_root = options_.builtin_corpus,
                                    .tokenizer = config_.data.tokenizer,
                                    .val_fraction = config_.data.val_fraction,
                                    .cache_dir = options_.cache_dir,
                                    .seq_len = config_.data.seq_len};
  if (is_root()) {
    data::PreparedCorpus corpus = data::prepare_corpus(options);
    mesh_.all->barrier();
    return corpus;
  }
  mesh_.all->barrier();
  return data::prepare_corpus(options);
}

void Trainer::announce() const {
  if (!options_.announce || !is_root()) return;
  log_info("model   {} {}, {} parameters, {}FLOPs per token", config_.model.family,
           config_.model.preset.empty() ? "custom" : config_.model.preset, with_commas(facts_.params),
           format_count(facts_.flops_per_token));
  log_info("data    {}", corpus_.description);
  log_info(
      "layout  {} on {}, policy {}, {} compute, global batch {} = micro batch {} x accumulation {} x {} "
      "ranks",
      mesh_.shape.to_string(), world_->device().str(), config_.parallel.policy, config_.precision.compute,
      batch_.global_batch, batch_.micro_batch, batch_.accumulation, batch_.dp_size);
  if (config_.model.n_heads > 0 && world_->device().is_cuda()) {
    const auto backend =
        nn::attention_backend(world_->device(), dtype_of(config_.precision.compute), config_.data.seq_len,
                              config_.model.d_model / config_.model.n_heads, config_.model.dropout);
    log_info("kernels attention by {}, logits in parts of {} MiB", nn::name(backend),
             config_.memory.loss_chunk_mib);
  }
}

/// Failures that the device met come to light when the host has waited for it.
void Trainer::check_groups() const {
  for (comm::Group* group : {mesh_.all.get(), mesh_.dp.get(), mesh_.shard.get(), mesh_.replicate.get()}) {
    group->check();
  }
}

/// `loss_sum` is an fp64 scalar on the device; everything travels in one piece: (ranks, 5), on the device.
at::Tensor Trainer::gather_totals(const at::Tensor& loss_sum) const {
  const bool gpu = world_->device().is_cuda();
  const kernels::MemoryPeak peak =
      gpu ? kernels::gpu_memory_peak() : kernels::MemoryPeak{kernels::resident_peak(), 0};
  const auto symmetric = static_cast<double>(engine_->symmetric_bytes());
  const int signal = options_.stop_signal ? options_.stop_signal->load() : 0;
  at::Tensor host = at::tensor({static_cast<double>(peak.allocated) + symmetric,
                                static_cast<double>(peak.reserved) + symmetric, static_cast<double>(signal)},
                               at::kDouble);
  if (gpu) host = host.pin_memory();  // else the copy would wait for the device
  const at::Tensor mine = at::cat({at::stack({loss_sum, engine_->grad_squares()}),
                                   host.to(world_->device(), /*non_blocking=*/true)});  // (5)
  return comm::gather_rows(*mesh_.all, mine);
}

StepTotals Trainer::read_totals(const at::Tensor& rows) const {
  StepTotals totals;
  std::vector<double> squares;
  for (const std::vector<double>& rank : comm::to_numbers(rows)) {
    totals.loss += rank[0];
    squares.push_back(rank[1]);
    totals.peak_bytes = std::max(totals.peak_bytes, rank[2]);
    totals.reserved_bytes = std::max(totals.reserved_bytes, rank[3]);
    totals.stop_signal = std::max(totals.stop_signal, static_cast<int>(rank[4]));
  }
  check_groups();
  totals.loss /= static_cast<double>(batch_.accumulation * batch_.dp_size);
  totals.grad_norm = std::sqrt(engine_->sum_over_ranks(squares)) / scaler_.scale();
  return totals;
}

std::string Trainer::where_not_finite() const {
  const std::string name = engine_->nonfinite_parameter();
  return name.empty() ? "" : fmt::format(" (rank {}: the gradient of {})", world_->rank(), name);
}

/// Ranks whose part of the gradient is finite have nothing to tell.
void Trainer::report_overflow(int64_t step, double scale) const {
  const std::string where = where_not_finite();
  if (where.empty()) return;
  log_warning("step {}: gradients overflow at loss scale {:g}{}; the step is skipped, the scale is now {:g}",
              step, scale, where, scaler_.scale());
}

/// Returns the sum of the losses, fp64 on the device.
at::Tensor Trainer::forward_backward() {
  const double scale = scaler_.scale() / static_cast<double>(batch_.accumulation * batch_.dp_size);
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions().device(world_->device()).dtype(at::kDouble));
  for (int64_t pass = 0; pass < batch_.accumulation; ++pass) {
    const data::Batch batch = loader_->next();
    engine_->begin_forward();
    const at::Tensor loss =
        model_->loss(batch.inputs.to(world_->device(), true), batch.targets.to(world_->device(), true),
                     config_.memory.loss_chunk_mib << 20, scale);
    engine_->backward(loss, scale, pass + 1 == batch_.accumulation);
    loss_sum += loss.detach();
  }
  return loss_sum;
}

void Trainer::check_finite(int64_t step) const {
  const bool may_overflow = scaler_.enabled() && scaler_.overflows_in_a_row() < kMostOverflowsInARow;
  if (std::isfinite(last_.loss) && (std::isfinite(last_.grad_norm) || may_overflow)) return;
  throw NumericsError(
      "[train.step] step {}: loss {} and gradient norm {} are not both finite{}; lower optim.lr (now "
      "{}), raise optim.warmup_steps or check the data",
      step, last_.loss, last_.grad_norm, where_not_finite(), config_.optim.lr);
}

/// Clips and updates on the device, before the host knows the norm: the GPU need not wait for it.
void Trainer::update_at_once(int64_t step, const at::Tensor& totals, double lr) {
  HostCopy arriving(totals);
  const at::Tensor norm = engine_->sum_over_ranks(totals.select(1, 1)).sqrt();
  optim::GradScale factor;
  factor.device = optim::clip_factor(norm, config_.train.grad_clip);
  engine_->step(*optimizer_, lr, factor);
  last_ = read_totals(arriving.wait());
  check_finite(step);
}

/// Looks at the norm first: gradients that overflow are not applied. Returns whether they were.
bool Trainer::update_if_finite(int64_t step, const at::Tensor& totals, double lr) {
  last_ = read_totals(totals);
  check_finite(step);
  const double loss_scale = scaler_.scale();
  const bool finite = std::isfinite(last_.grad_norm);
  scaler_.update(finite);
  if (finite) {
    engine_->step(*optimizer_, lr, optim::clip_factor(last_.grad_norm, config_.train.grad_clip) / loss_scale);
  } else {
    engine_->skip_step();
    report_overflow(step, loss_scale);
  }
  return finite;
}

StepRecord Trainer::step(int64_t index) {
  const double begin = monotonic_seconds();
  const bool last = index == config_.train.steps;
  engine_->measure(last);  // once, since reading the times waits for the device
  const int64_t sent_before = engine_->sent_bytes();
  const double lr = optim::learning_rate(config_.optim, index, config_.train.steps);
  const double loss_scale = scaler_.scale();
  const at::Tensor totals = gather_totals(forward_backward());
  bool applied = true;
  if (world_->device().is_cuda() && !scaler_.enabled()) {
    update_at_once(index, totals, lr);
  } else {
    applied = update_if_finite(index, totals, lr);
  }
  step_wire_bytes_ = engine_->sent_bytes() - sent_before;
  if (last) step_times_ = engine_->take_times();
  engine_->measure(false);
  const double seconds = monotonic_seconds() - begin;
  const int64_t step_tokens = batch_.global_batch * config_.data.seq_len;
  return {.step = index,
          .loss = last_.loss,
          .grad_norm = last_.grad_norm,
          .lr = lr,
          .tokens = index * step_tokens,
          .tokens_per_s = static_cast<double>(step_tokens) / seconds,
          .step_ms = 1e3 * seconds,
          .peak_bytes = static_cast<int64_t>(last_.peak_bytes),
          .reserved_bytes = static_cast<int64_t>(last_.reserved_bytes),
          .loss_scale = scaler_.enabled() ? std::optional(loss_scale) : std::nullopt,
          .skipped = !applied,
          .val_loss = std::nullopt};
}

bool Trainer::validates_at(int64_t step) const {
  if (!val_data_) return false;
  const int64_t every = config_.train.val_every;
  return step == config_.train.steps || last_.stop_signal != 0 || (every > 0 && step % every == 0);
}

double Trainer::validate() {
  return validation_loss(*model_, *engine_, *val_data_, config_.train.val_batches * batch_.global_batch,
                         batch_.micro_batch, mesh_);
}

std::string Trainer::sample() {
  const auto tokenizer = data::make_tokenizer(config_.data.tokenizer);
  std::vector<int32_t> prompt = tokenizer->encode(config_.train.sample_prompt);
  const parallel::DataParallel::Held held(*engine_);
  model_->eval();
  const std::vector<int32_t> tokens = generate(*model_, prompt,
                                               {.max_tokens = config_.train.sample_tokens,
                                                .seed = static_cast<uint64_t>(config_.seed),
                                                .context = config_.data.seq_len},
                                               world_->device());
  return config_.train.sample_prompt + tokenizer->decode(tokens);
}

TrainResult Trainer::run() {
  announce();
  TrainResult result;
  std::vector<double> speeds;
  const double started = monotonic_seconds();
  const int64_t profiled = is_root() ? std::min(config_.train.profile_steps, config_.train.steps) : 0;
  Profiler profiler(options_.trace_path, std::min(kWarmupSteps, config_.train.steps - profiled) + 1,
                    profiled);
  for (int64_t index = 1; index <= config_.train.steps && result.stop_signal == 0; ++index) {
    profiler.begin_step(index);
    StepRecord record = step(index);
    if (profiler.end_step(index)) {
      log_info("profile {}; trace in {}", to_text(profiler.result()), options_.trace_path);
    }
    if (index == 1) result.summary.seconds_to_first_step = seconds_since_exec();
    if (index > std::min(kWarmupSteps, config_.train.steps / 2)) speeds.push_back(record.tokens_per_s);
    result.stop_signal = last_.stop_signal;
    if (validates_at(index)) record.val_loss = validate();
    result.summary.steps = index;
    result.summary.final_loss = record.loss;
    result.summary.peak_bytes = record.peak_bytes;
    if (record.val_loss) result.summary.final_val_loss = record.val_loss;
    if (is_root()) {
      for (Sink* sink : options_.sinks) sink->record(record);
    }
  }
  finish(result, started, speeds);
  return result;
}

/// Between steps, so that it is what a rank holds for good.
RunCost Trainer::cost() const {
  const plan::EngineSetting setting = plan::engine_setting(config_, mesh_.shape, batch_.accumulation);
  const std::vector<plan::UnitSpec> units = plan::engine_units(config_, facts_);
  const plan::StateBytes predicted = plan::engine_state(units, setting);
  plan::StateBytes measured = engine_->state_bytes();
  measured.optimizer += optimizer_->state_bytes();
  const auto of = [](const plan::StateBytes& bytes) {
    return RunCost::State{bytes.parameters, bytes.gradients, bytes.optimizer};
  };
  return {
      .predicted = of(predicted),
      .measured = of(measured),
      .predicted_wire_bytes = plan::engine_wire_bytes(units, setting),
      .measured_wire_bytes = step_wire_bytes_,
      .predicted_activation_bytes = plan::activation_bytes(facts_, batch_.micro_batch * config_.data.seq_len),
      .communication_ms = step_times_.busy_ms,
      .exposed_ms = step_times_.exposed_ms};
}

void Trainer::finish(TrainResult& result, double started, const std::vector<double>& speeds) {
  engine_->average_parameters();
  if (config_.checkpoint.final_weights) save_weights(*engine_, facts_, options_.weights_path, is_root());
  result.summary.weights_digest = parallel::weights_digest(*engine_);
  result.summary.cost = cost();
  result.summary.tokens_per_s = median(speeds);
  if (config_.train.sample_tokens > 0 && result.stop_signal == 0) result.summary.sample = sample();
  result.summary.wall_s = monotonic_seconds() - started;
  if (is_root()) {
    for (Sink* sink : options_.sinks) sink->finish(result.summary);
  }
  mesh_.all->barrier();
}

}  // namespace

TrainResult train(const TrainOptions& options, std::shared_ptr<comm::World> world) {
  const int64_t ranks = world->size();
  try {
    return Trainer(options, std::move(world)).run();
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory("[train] the device is out of memory: {}. {}", error.what_without_backtrace(),
                      plan::memory_advice(options.config, ranks));
  }
}

}  // namespace trireme::train
