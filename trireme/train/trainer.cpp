#include "trireme/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <exception>
#include <optional>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/data/tokenizer.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/optim/learning_rate.h"
#include "trireme/parallel/recording.h"
#include "trireme/plan/cuda_graphs.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/recompute.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/train/best_weights.h"
#include "trireme/train/checkpointing.h"
#include "trireme/train/enough_memory.h"
#include "trireme/train/fp8.h"
#include "trireme/train/guesses.h"
#include "trireme/train/moment.h"
#include "trireme/train/parts.h"
#include "trireme/train/profile.h"
#include "trireme/train/run_records.h"
#include "trireme/train/same_config.h"
#include "trireme/train/stop.h"
#include "trireme/train/totals.h"
#include "trireme/train/validate.h"

namespace trireme::train {
namespace {

/// Overflows in a row after which a smaller loss scale will not help either.
constexpr int64_t kMostOverflowsInARow = 64;
/// How torch refuses an operation when it was told to repeat its bits.
constexpr std::string_view kNotDeterministic = "does not have a deterministic implementation";
std::optional<double> busy_ms(const std::optional<parallel::CommTimes>& times) {
  return times ? std::optional(times->busy_ms) : std::nullopt;
}

std::optional<double> exposed_ms(const std::optional<parallel::CommTimes>& times) {
  return times ? std::optional(times->exposed_ms) : std::nullopt;
}

/// A step whose work is enqueued. Its totals are on their way, or have been read.
struct Enqueued {
  int64_t step = 0;
  double lr = 0.0;
  double loss_scale = 1.0;
  int64_t sent_before = 0;  ///< bytes that this rank had sent when the step began
  bool stayed = false;      ///< units kept their memory then
  bool applied = true;
  std::optional<TotalsOnTheWay> arriving = {};
  std::optional<Moment> over = {};
  std::optional<parallel::CommTimes> communication = {};  ///< until then; on a GPU none
  StepTotals totals = {};
};

class Trainer {
 public:
  /// `baseline_bytes` as RunCost says.
  Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes,
          int64_t baseline_bytes);
  TrainResult run();

 private:
  TrainResult run_steps();
  void begin_with_weights();
  void enqueue(int64_t index);
  Enqueued begin(int64_t index);
  void end(Enqueued&& step);
  void count_sent(const Enqueued& step);
  bool measures_activations(int64_t step) const;
  void end_time_of(Enqueued& step);
  void update_at_once(Enqueued& step, const at::Tensor& rows);
  void update_if_finite(Enqueued& step, const at::Tensor& rows);
  void check_finite(const Enqueued& step) const;
  std::string where_not_finite(const StepTotals& totals) const;
  void report_overflow(const Enqueued& step) const;
  bool times_communication(int64_t step) const;
  bool ends_after(int64_t step) const;
  bool validates_after(int64_t step) const;
  bool saves_after(int64_t step) const;
  bool pauses_after(int64_t step) const;
  bool waits_for(int64_t step) const;
  void settle(size_t left);
  void complete(StepRecord& record, bool ends);
  void end_early(StepRecord& record);
  StepRecord settle_oldest();
  void keep_weights();
  void begin_records();
  RunCost cost() const;
  void validate(StepRecord& record);
  void show(const Guesses& guesses, int64_t step) const;
  std::string sample();
  int64_t step_to_record() const;
  void report_pipeline();
  void finish();

  Parts parts_;
  const TrainOptions& options_;
  const plan::Config& config_;
  TrainedModel& model_;
  precision::LossScaler scaler_;
  Checkpointing checkpoints_;
  Checkpointing::Resumed resumed_;
  RunRecords records_;
  std::optional<BestWeights> best_;
  bool runs_ahead_;
  int64_t profiled_;                ///< steps that rank 0 traces
  int64_t first_profiled_;          ///< the first of them
  int64_t recorded_;                ///< the step of a pipeline that all ranks record; 0: none
  std::deque<Enqueued> under_way_;  ///< steps that nobody has heard of yet; at most two
  std::optional<Moment> since_;     ///< when the last of the others was over; none: there was a pause
  TrainResult result_;
  bool weights_kept_ = false;
  std::exception_ptr weights_error_;  ///< why they could not be written; the run fails when it is recorded
  int64_t step_wire_bytes_ = 0;       ///< sent by this rank in a full step
  bool sends_anew_ = true;            ///< the next step is the first that communicates as all after it
  bool counts_first_ = false;         ///< the full step is the first of the run
  int64_t baseline_bytes_;
  std::optional<parallel::CommTimes> step_times_;  ///< of the last step that was settled
};

Trainer::Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes,
                 int64_t baseline_bytes)
    : parts_(options, std::move(world), records_passes),
      options_(options),
      config_(parts_.config),
      model_(*parts_.model),
      scaler_(config_.precision.loss_scale, plan::scales_loss(config_.precision)),
      checkpoints_(options, parts_, scaler_),
      resumed_(checkpoints_.resume()),
      records_(parts_, resumed_.step, resumed_.loss),
      runs_ahead_(options.run_ahead.value_or(parts_.on_gpu()) && !scaler_.enabled()),
      profiled_(std::min(config_.train.profile_steps, config_.train.steps - resumed_.step)),
      first_profiled_(std::min(resumed_.step + kWarmupSteps, config_.train.steps - profiled_) + 1),
      recorded_(step_to_record()),
      baseline_bytes_(baseline_bytes) {
  if (resumed_.step == 0 && !config_.model.weights.empty()) begin_with_weights();
  if (config_.checkpoint.best && parts_.validates)
    best_.emplace(options.best_weights_path, resumed_.step, parts_.mesh);
}

void Trainer::begin_with_weights() {
  model_.load_weights(config_.model.weights, config_.parallel.pp > 1);
  if (options_.announce && parts_.is_root()) log_info("weights from {}", config_.model.weights);
}

/// The step before the traced ones, if there is one: tracing takes time, and the tracer and the recorder
/// watch the allocator at the same place.
int64_t Trainer::step_to_record() const {
  if (profiled_ == 0 || config_.parallel.pp == 1) return 0;
  return std::max(first_profiled_ - 1, resumed_.step + 1);
}

std::string Trainer::where_not_finite(const StepTotals& totals) const {
  const std::string name = under_way_.empty() ? model_.nonfinite_parameter() : std::string();
  if (!name.empty()) return fmt::format(" (rank {}: the gradient of {})", parts_.world->rank(), name);
  // The gradients may be overwritten already; the totals have the unit's name.
  return runs_ahead_ && !totals.not_finite.empty() ? fmt::format(" ({})", totals.not_finite) : std::string();
}

/// Warns on ranks whose part of the gradient is not finite.
void Trainer::report_overflow(const Enqueued& step) const {
  const std::string where = where_not_finite(step.totals);
  if (where.empty()) return;
  log_warning("step {}: gradients overflow at loss scale {:g}{}; skipping the step, the scale is now {:g}",
              step.step, step.loss_scale, where, scaler_.scale());
}

void Trainer::check_finite(const Enqueued& step) const {
  const double loss = step.totals.loss, grad_norm = step.totals.grad_norm;
  const bool may_overflow = scaler_.enabled() && scaler_.overflows_in_a_row() < kMostOverflowsInARow;
  if (std::isfinite(loss) && (std::isfinite(grad_norm) || may_overflow)) return;
  throw NumericsError(
      "[train.step] step {}: loss {} or gradient norm {} is not finite{}; lower optim.lr (now {}), raise "
      "optim.warmup_steps or check the data",
      step.step, loss, grad_norm, where_not_finite(step.totals), config_.optim.lr);
}

/// Ends the time of the step: what follows counts for the next one.
void Trainer::end_time_of(Enqueued& step) {
  step.over.emplace(parts_.world->device());
  if (!parts_.on_gpu() && times_communication(step.step)) step.communication = model_.take_times();
}

/// Clips and updates without a look at the norm. On a GPU the host does not wait.
void Trainer::update_at_once(Enqueued& step, const at::Tensor& rows) {
  step.arriving.emplace(rows);
  end_time_of(step);
  optim::GradScale factor;
  if (parts_.on_gpu()) {
    factor.device = optim::clip_factor(grad_norm_of(parts_, rows), config_.train.grad_clip);
  } else {
    factor.host =
        optim::clip_factor(read_totals(parts_, rows, step.loss_scale).grad_norm, config_.train.grad_clip);
  }
  checkpoints_.before_update();
  model_.step(step.lr, factor);
}

/// Looks at the norm first: gradients that overflow are not applied.
void Trainer::update_if_finite(Enqueued& step, const at::Tensor& rows) {
  step.totals = read_totals(parts_, rows, step.loss_scale);
  end_time_of(step);
  check_finite(step);
  step.applied = std::isfinite(step.totals.grad_norm);
  scaler_.update(step.applied);
  if (step.applied) {
    checkpoints_.before_update();
    model_.step(step.lr,
                optim::clip_factor(step.totals.grad_norm, config_.train.grad_clip) / step.loss_scale);
  } else {
    model_.skip_step();
    report_overflow(step);
  }
}

/// A step: fetch, forward and backward of each micro-batch, norm, clip, update.
void Trainer::enqueue(int64_t index) {
  Enqueued step = begin(index);
  const at::Tensor loss = model_.run_passes(parts_.next_batch, step.loss_scale);
  const at::Tensor rows = gather_totals(parts_, loss);
  runs_ahead_ ? update_at_once(step, rows) : update_if_finite(step, rows);
  end(std::move(step));
}

Enqueued Trainer::begin(int64_t index) {
  if (!since_) {
    since_.emplace(parts_.world->device());
    model_.take_times();  // of the update before the pause
  }
  model_.measure(times_communication(index));
  model_.measure_activations(measures_activations(index));
  return {.step = index,
          .lr = optim::learning_rate(config_.optim, index, config_.train.steps),
          .loss_scale = scaler_.scale(),
          .sent_before = model_.sent_bytes(),
          .stayed = model_.stays_in_place()};
}

/// Not of the first step, which also allocates memory that later steps use again; and of two, since the one
/// that ends an epoch may have fewer rows.
bool Trainer::measures_activations(int64_t step) const {
  const int64_t first = std::min<int64_t>(resumed_.step + 2, config_.train.steps);
  return profiled_ == 0 && (step == first || step == first + 1);
}

/// A full step sends most: the one that ends an epoch may have fewer micro-batches, and the one behind a
/// validation finds parameters that are gathered already. Steps before hooks start, or before units keep
/// their memory, are not those of the run, nor is the first, in which ranks agree on more, where another one
/// begins like it.
void Trainer::count_sent(const Enqueued& step) {
  const int64_t sent = model_.sent_bytes() - step.sent_before;
  const bool is_first = step.step == resumed_.step + 1;
  const int64_t samples = parts_.samples_in(step.step) - parts_.samples_in(step.step - 1);
  const bool is_full = samples == parts_.batch.global_batch && !validates_after(step.step - 1);
  const bool replaces = sends_anew_ || (counts_first_ && is_full);
  step_wire_bytes_ = replaces ? sent : std::max(step_wire_bytes_, sent);
  counts_first_ = is_first || (counts_first_ && !replaces);
  const plan::ParallelConfig& parallel = config_.parallel;
  const bool hook_starts = plan::starts_late(parallel.comm_hook) && step.step == parallel.hook_start;
  sends_anew_ = hook_starts || step.stayed != model_.stays_in_place();
}

void Trainer::end(Enqueued&& step) {
  count_sent(step);
  model_.measure(false);
  const int64_t index = step.step;
  under_way_.push_back(std::move(step));
  if (index == plan::kStepsBeforeRecording + 1 && model_.recorded_passes() > 0 && options_.announce) {
    log_info("graphs  {} kinds of pass are recorded as CUDA graphs and replayed from now on",
             model_.recorded_passes());
  }
}

/// A rank alone communicates with nobody. On a GPU the times of one step are read while the next is under
/// way, which is then not timed.
bool Trainer::times_communication(int64_t step) const {
  if (parts_.batch.dp_size == 1) return false;
  if (!parts_.on_gpu() || step == config_.train.steps) return true;
  const int64_t every = config_.train.log_every;
  return every > 1 && step % every == 0 && step + 1 != config_.train.steps;
}

bool Trainer::ends_after(int64_t step) const {
  return step == config_.train.steps || result_.stop_signal != 0;
}

bool Trainer::validates_after(int64_t step) const {
  if (!parts_.validates || result_.stop_signal != 0) return false;
  const int64_t every = config_.train.val_every;
  const bool is_due = every > 0 ? step % every == 0 : parts_.epoch_ends_with(step);
  return is_due || step == config_.train.steps;
}

bool Trainer::saves_after(int64_t step) const {
  return checkpoints_.is_due(step) || (checkpoints_.can_save(step) && ends_after(step));
}

/// Whether something else than a step follows, which wants the device for itself.
bool Trainer::pauses_after(int64_t step) const {
  const bool profile_begins = profiled_ > 0 && step + 1 == first_profiled_;
  const bool profile_ends = profiled_ > 0 && step + 1 == first_profiled_ + profiled_;
  return validates_after(step) || saves_after(step) || profile_begins || profile_ends || step == recorded_;
}

/// Whether the host goes on only when this step is over: it is the last, its end is measured, or a pause
/// follows. The same on all ranks, which would otherwise see a stop signal at different steps.
bool Trainer::waits_for(int64_t step) const {
  return !runs_ahead_ || step == resumed_.step + 1 || step == config_.train.steps || pauses_after(step);
}

/// Waits for the totals of the oldest step. Throws NumericsError when they are not finite.
StepRecord Trainer::settle_oldest() {
  Enqueued step = std::move(under_way_.front());
  under_way_.pop_front();
  if (step.arriving) {
    step.totals = read_totals(parts_, step.arriving->wait(), step.loss_scale);
    check_finite(step);
  }
  step_times_ = step.communication;
  if (parts_.on_gpu() && times_communication(step.step)) step_times_ = model_.take_times();
  const double seconds = step.over->seconds_after(*since_);
  since_ = std::move(step.over);
  const StepTotals& totals = step.totals;
  if (step.step == resumed_.step + 1) records_.summary().seconds_to_first_step = seconds_since_exec();
  if (result_.stop_signal == 0) result_.stop_signal = totals.stop_signal;
  if (config_.parallel.pp > 1)
    records_.summary().peak_bytes_by_pp_rank.assign(totals.peak_by_pp_rank.begin(),
                                                    totals.peak_by_pp_rank.end());
  const auto tokens_in = [this](int64_t steps) { return parts_.samples_in(steps) * config_.data.seq_len; };
  const int64_t tokens = tokens_in(step.step);
  return {.step = step.step,
          .loss = totals.loss,
          .grad_norm = totals.grad_norm,
          .lr = step.lr,
          .tokens = tokens,
          .tokens_per_s = static_cast<double>(tokens - tokens_in(step.step - 1)) / seconds,
          .step_ms = 1e3 * seconds,
          .peak_bytes = static_cast<int64_t>(totals.peak_bytes),
          .active_bytes = static_cast<int64_t>(totals.active_bytes),
          .reserved_bytes = static_cast<int64_t>(totals.reserved_bytes),
          .loss_scale = scaler_.enabled() ? std::optional(step.loss_scale) : std::nullopt,
          .skipped = !step.applied,
          .val_loss = std::nullopt,
          .communication_ms = busy_ms(step_times_),
          .exposed_ms = exposed_ms(step_times_)};
}

/// Records what is under way but for the `left` newest steps; all of it once a step has seen a stop signal.
void Trainer::settle(size_t left) {
  while (under_way_.size() > (result_.stop_signal == 0 ? left : 0)) {
    StepRecord record = settle_oldest();
    if (under_way_.empty() && saves_after(record.step))
      record.checkpoint_ms = checkpoints_.save(record, ends_after(record.step));
    const bool ends = ends_after(record.step);
    if (under_way_.empty() && ends) keep_weights();
    complete(record, ends);
  }
}

/// What follows the save of a step: validation, and its record. `ends`: the run was known to end with the
/// step when it was saved.
void Trainer::complete(StepRecord& record, bool ends) {
  if (under_way_.empty() && validates_after(record.step)) validate(record);
  if (under_way_.empty() && !ends && ends_after(record.step)) end_early(record);
  record.tflops_per_rank =
      1e-12 * parts_.facts.flops_per_token * record.tokens_per_s / static_cast<double>(parts_.world->size());
  records_.record(record);
}

/// A stop signal came in the pause after the step.
void Trainer::end_early(StepRecord& record) {
  if (record.checkpoint_ms) {
    checkpoints_.finish();
  } else if (checkpoints_.can_save(record.step)) {
    record.checkpoint_ms = checkpoints_.save(record, /*last=*/true);
  }
  keep_weights();
}

/// Rank 0 writes them, and all ranks hear of a disk that fails.
void Trainer::keep_weights() {
  if (weights_kept_) return;
  weights_kept_ = true;
  checkpoints_.before_update();
  model_.average_parameters();
  if (!config_.checkpoint.final_weights) return;
  try {
    model_.save_weights(options_.weights_path);
  } catch (const EnvironmentError& error) {
    weights_error_ = parts_.is_root() ? std::current_exception()
                                      : std::make_exception_ptr(FailedElsewhere(error.exit_code(), 0));
  }
}

/// Validates the averages of the parameters where they are kept. The record stays without results when a
/// signal came meanwhile.
void Trainer::validate(StepRecord& record) {
  const auto told_to_stop = [this] {
    result_.stop_signal = signal_of_any_rank(options_, parts_.mesh);
    return result_.stop_signal != 0;
  };
  std::optional<Guesses> guesses;  // of images, at the end
  if (parts_.data->has_labels() && record.step == config_.train.steps)
    guesses.emplace(std::ssize(parts_.data->classes()));
  const bool averages = config_.optim.ema > 0.0;
  if (averages) {
    checkpoints_.before_update();
    model_.swap_averages();
  }
  const auto found =
      train::validate(model_, *parts_.data, config_.train.val_batches * parts_.batch.global_batch,
                      parts_.feed_options(), parts_.mesh, told_to_stop, guesses ? &*guesses : nullptr);
  if (found && best_) best_->keep(record.step, *found, model_);
  if (averages) model_.swap_averages();
  if (!found) return;
  if (guesses) show(*guesses, record.step);
  record.val_loss = found->loss;
  record.val_top1 = found->top1;
  record.val_top5 = found->top5;
}

void Trainer::show(const Guesses& guesses, int64_t step) const {
  Classification all = guesses.of_all_ranks(*parts_.mesh.all);
  if (!options_.show_guesses) return;
  all.step = step;
  describe(all, *parts_.data);
  options_.show_guesses(all);
}

std::string Trainer::sample() {
  const auto tokenizer = data::make_tokenizer(config_.data.tokenizer);
  std::vector<int32_t> prompt = tokenizer->encode(config_.train.sample_prompt);
  const auto told_to_stop = [this] { return signal_of_any_rank(options_, parts_.mesh) != 0; };
  const std::vector<int32_t> tokens = model_.generate(prompt, {.max_tokens = config_.train.sample_tokens,
                                                               .vocab_size = tokenizer->vocab_size(),
                                                               .seed = static_cast<uint64_t>(config_.seed),
                                                               .context = config_.data.seq_len,
                                                               .gives_up = told_to_stop});
  return config_.train.sample_prompt + tokenizer->decode(tokens);
}

TrainResult Trainer::run() {
  try {
    return run_steps();
  } catch (const CommError&) {
    checkpoints_.give_up();
    throw;
  }
}

TrainResult Trainer::run_steps() {
  announce(parts_);
  Profiler profiler(options_.trace_path, first_profiled_, parts_.is_root() ? profiled_ : 0);
  begin_records();
  for (int64_t step = resumed_.step + 1; step <= config_.train.steps && result_.stop_signal == 0; ++step) {
    profiler.begin_step(step);
    if (step == recorded_) model_.record_steps(true);
    enqueue(step);
    settle(waits_for(step) ? 0 : 1);
    if (step == recorded_) report_pipeline();
    if (pauses_after(step)) since_.reset();
    if (profiler.end_step(step)) {
      log_info("profile {}; open {} in chrome://tracing or Perfetto", to_text(profiler.result()),
               options_.trace_path);
    }
  }
  finish();
  result_.summary = records_.summary();
  return std::move(result_);
}

void Trainer::report_pipeline() {
  const std::optional<plan::PipelineReport> report = model_.step_report();
  model_.record_steps(false);
  if (parts_.is_root() && report && options_.show_pipeline) options_.show_pipeline(*report);
}

/// Drops the records of steps that are made again, and completes a step that was saved but not yet recorded;
/// a run that was complete has nothing to add.
void Trainer::begin_records() {
  const bool recorded = records_.begin();
  if (!resumed_.record) return;
  const bool root_has_it =
      comm::gather_scalars(*parts_.mesh.all, {recorded ? 1.0 : 0.0}).front().front() > 0.0;
  if (!root_has_it) complete(*resumed_.record, resumed_.step == config_.train.steps);
}

RunCost Trainer::cost() const {
  RunCost cost = predicted_cost(parts_);
  const plan::StateBytes held = model_.state_bytes();
  cost.measured = {held.parameters, held.gradients, held.optimizer};
  // Ranks of a pipeline send and are predicted to send different amounts, and all may have different rows.
  const auto ranks =
      comm::gather_scalars(*parts_.mesh.all, {static_cast<double>(step_wire_bytes_),
                                              static_cast<double>(cost.predicted_wire_bytes.value_or(0)),
                                              static_cast<double>(model_.activation_bytes())});
  const auto largest = [&](size_t place) {
    const auto rank = std::ranges::max_element(ranks, {}, [&](const auto& row) { return row[place]; });
    return static_cast<int64_t>((*rank)[place]);
  };
  cost.measured_wire_bytes = largest(0);
  if (cost.predicted_wire_bytes) cost.predicted_wire_bytes = largest(1);
  if (const int64_t kept = largest(2); kept > 0) cost.measured_activation_bytes = kept;
  cost.measured_copy_bytes = checkpoints_.copy_bytes();
  cost.baseline_bytes = baseline_bytes_;
  cost.communication_ms = busy_ms(step_times_);
  cost.exposed_ms = exposed_ms(step_times_);
  return cost;
}

void Trainer::finish() {
  RunSummary& summary = records_.summary();
  keep_weights();
  if (weights_error_) std::rethrow_exception(weights_error_);
  summary.weights_digest = model_.weights_digest();
  summary.why_bits_vary = why_bits_vary(parts_);
  summary.cost = cost();
  if (config_.train.sample_tokens > 0 && result_.stop_signal == 0) summary.sample = sample();
  const int signal = signal_of_any_rank(options_, parts_.mesh);
  if (result_.stop_signal == 0) result_.stop_signal = signal;
  summary.stop_signal = result_.stop_signal;
  checkpoints_.finish();  // where the last step could not be saved, one before it may be under way
  summary.checkpoints = checkpoints_.written();
  summary.checkpoints_late = checkpoints_.late();
  summary.checkpoints_failed = checkpoints_.failed();
  result_.resumable = result_.stop_signal != 0 && (resumed_.step > 0 || checkpoints_.has_written());
  if (config_.checkpoint.final_weights) summary.weights_path = options_.weights_path;
  if (best_ && best_->step() > 0) {
    summary.best_weights_path = best_->path();
    summary.best_step = best_->step();
  }
  records_.finish();
}

/// libgomp ends the process when it cannot make its threads, so they are made while there is memory: by an
/// operator that is large enough for all of them.
void make_threads() {
  at::zeros({at::get_num_threads() * at::internal::GRAIN_SIZE}, at::kByte);
}

/// Throws ConfigError when `error` says that an operation cannot repeat its bits.
void refuse_indeterminism(const std::exception& error) {
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
  if (from_torch == nullptr) return;
  const std::string text = from_torch->what_without_backtrace();
  const size_t place = text.find(kNotDeterministic);
  if (place == std::string::npos) return;
  throw ConfigError("[train] train.deterministic=true is not possible: {}; set it to false",
                    text.substr(0, place + kNotDeterministic.size()));
}

}  // namespace

TrainResult train(const TrainOptions& given, std::shared_ptr<comm::World> world) {
  const int64_t ranks = world->size();
  const plan::Device device = world->device().is_cuda() ? plan::Device::kCuda : plan::Device::kCpu;
  try {
    check_same_config(given.config, *world);
    TrainOptions options = given;
    options.config = plan::settle_recompute(settle_fp8(given.config, *world), device);
    check_enough_memory(options, *world);
    make_threads();
    const int64_t baseline_bytes = world->device().is_cuda() ? 0 : kernels::resident_peak();
    const plan::TrainConfig& config = options.config.train;
    const kernels::Repeatable repeatable(config.deterministic);
    const bool tunes = config.tune_matmul && !config.deterministic;
    const kernels::MatmulTuning tuning(tunes);
    const kernels::TunedConvolutions convolutions(tunes && world->device().is_cuda() &&
                                                  plan::reads_images(options.config.model.family));
    const bool records_passes = can_record(options.config, *world);
    std::optional<c10::StreamGuard> stream;  // this thread's while it trains
    if (records_passes) {
      kernels::synchronize_gpu();  // of what was enqueued elsewhere so far
      stream.emplace(parallel::recording_stream(world->device()));
    }
    return Trainer(options, std::move(world), records_passes, baseline_bytes).run();
  } catch (const Stopped& stopped) {
    return {.summary = {}, .stop_signal = stopped.signal()};
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory("[train] the device is out of memory: {}. {}", error.what_without_backtrace(),
                      plan::memory_advice(given.config, ranks, device));
  } catch (const std::exception& error) {
    if (is_out_of_host_memory(error)) {
      throw OutOfMemory("[train] the host is out of memory. {}",
                        plan::memory_advice(given.config, ranks, device));
    }
    refuse_indeterminism(error);
    throw;
  }
}

}  // namespace trireme::train
