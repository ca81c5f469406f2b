#include "trireme/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <optional>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/comm/agree.h"
#include "trireme/data/tokenizer.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/parallel/recording.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/recompute.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/train/agenda.h"
#include "trireme/train/checkpointing.h"
#include "trireme/train/enough_memory.h"
#include "trireme/train/fp8.h"
#include "trireme/train/parts.h"
#include "trireme/train/profile.h"
#include "trireme/train/program_call.h"
#include "trireme/train/run_cost.h"
#include "trireme/train/run_records.h"
#include "trireme/train/same_config.h"
#include "trireme/train/steps_under_way.h"
#include "trireme/train/stop.h"
#include "trireme/train/validations.h"

namespace trireme::train {
namespace {

/// How torch refuses an operation when it was told to repeat its bits.
constexpr std::string_view kNotDeterministic = "does not have a deterministic implementation";

std::string adapter_folder(const std::string& weights_path) {
  return (std::filesystem::path(weights_path).parent_path() / "adapter").string();
}

/// When a run began: with its process, or now, where that has made one before.
class Beginning {
 public:
  double seconds() const { return before_s_ + monotonic_seconds() - at_s_; }

 private:
  static double of_process() {
    static std::atomic<bool> has_run = false;
    return has_run.exchange(true) ? 0.0 : seconds_since_exec();
  }

  double before_s_ = of_process(), at_s_ = monotonic_seconds();
};

/// A run from its weights, its own or a checkpoint's, to the last step's and the summary.
class Trainer {
 public:
  /// `baseline_bytes` as RunCost says.
  Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes,
          int64_t baseline_bytes);
  void begin();
  bool is_over() const { return next_step_ > agenda_.last_step() || agenda_.is_over(); }
  void make_step();
  TrainResult finish();
  void give_up() { checkpoints_.give_up(); }

 private:
  Checkpointing::Resumed resume_or_begin();
  void begin_adapters();
  void agree_on_base();
  void begin_records();
  void settle(size_t left);
  StepRecord settle_oldest();
  void complete(StepRecord& record, bool ends);
  void end_early(StepRecord& record);
  void keep_weights();
  void report_pipeline();
  std::string sample();

  Beginning began_;
  Parts parts_;
  const TrainOptions& options_;
  const plan::Config& config_;
  TrainedModel& model_;
  precision::LossScaler scaler_;
  Checkpointing checkpoints_;
  Checkpointing::Resumed resumed_;
  RunRecords records_;
  Agenda agenda_;
  StepsUnderWay steps_;
  Validations validations_;
  int64_t next_step_;
  std::optional<Profiler> profiler_;
  bool weights_kept_ = false;
  std::exception_ptr weights_error_;  ///< why they could not be written; the run fails when it is recorded
  int64_t baseline_bytes_;
};

Trainer::Trainer(const TrainOptions& options, std::shared_ptr<comm::World> world, bool records_passes,
                 int64_t baseline_bytes)
    : parts_(options, std::move(world), records_passes),
      options_(options),
      config_(parts_.config),
      model_(*parts_.model),
      scaler_(config_.precision.loss_scale, plan::scales_loss(config_.precision)),
      checkpoints_(options, parts_, scaler_),
      resumed_(resume_or_begin()),
      records_(parts_, resumed_.step, resumed_.loss),
      agenda_(parts_, checkpoints_, resumed_.step),
      steps_(parts_, scaler_, checkpoints_, agenda_),
      validations_(parts_, checkpoints_, agenda_, resumed_.step),
      next_step_(agenda_.first_step()),
      baseline_bytes_(baseline_bytes) {}

/// Each rank reads the base itself, and where it keeps all of it nothing else would tell of another file.
void Trainer::agree_on_base() {
  const std::vector<std::string> all =
      parts_.world->gather_texts("digest of the weights under adapters", parts_.base_digest);
  const auto other = std::ranges::find_if(all, [&](const std::string& one) { return one != all.front(); });
  if (other == all.end()) return;
  throw ConfigError(
      "[train.adapter] rank {} has read other weights than rank 0 ({}, not {}) from model.weights={}; give "
      "all hosts the "
      "same file",
      other - all.begin(), *other, all.front(), config_.model.weights);
}

/// Checkpoints have adapters alone, so the weights under them are read whenever a run begins or goes on.
void Trainer::begin_adapters() {
  const std::string& weights = config_.model.weights;
  if (!weights.empty()) model_.load_base(weights);
  parts_.base_digest = fmt::format("{} {}", config_.precision.compute, model_.base_digest());
  agree_on_base();
  if (!options_.announce || !parts_.is_root()) return;
  log_info("adapter {} of rank {} on {}: {} of {} parameters are trained, on weights from {}{}",
           config_.model.adapter.kind, config_.model.adapter.rank, config_.model.adapter.targets,
           with_commas(plan::trained_params(parts_.facts)), with_commas(parts_.facts.params),
           weights.empty() ? fmt::format("seed {}", config_.seed) : weights,
           config_.model.adapter.base == plan::AdapterBase::kNf4 ? ", blocks in nf4" : "");
}

/// With members up to checkpoints_ alone.
Checkpointing::Resumed Trainer::resume_or_begin() {
  if (plan::has_adapters(config_)) begin_adapters();
  Checkpointing::Resumed resumed = checkpoints_.resume();
  if (resumed.step > 0) return resumed;
  if (const std::string& adapter = config_.model.adapter.weights; !adapter.empty())
    model_.load_adapter(adapter, parts_.base_digest);
  if (config_.model.weights.empty() || plan::has_adapters(config_)) return resumed;
  model_.load_weights(config_.model.weights);
  if (options_.announce && parts_.is_root()) log_info("weights from {}", config_.model.weights);
  return resumed;
}

void Trainer::begin() {
  announce(parts_);
  profiler_.emplace(options_.trace_path, agenda_.first_profiled(),
                    parts_.is_root() ? agenda_.profiled_steps() : 0, parts_.on_gpu());
  begin_records();
}

void Trainer::make_step() {
  const int64_t step = next_step_++;
  beat();
  profiler_->begin_step(step);
  if (agenda_.records_pipeline(step)) model_.passes().report_steps(true);
  steps_.enqueue(step);
  settle(steps_.run_ahead() && !agenda_.waits_for(step) ? 1 : 0);
  if (agenda_.records_pipeline(step)) report_pipeline();
  if (agenda_.pauses_after(step)) steps_.pause();
  if (profiler_->end_step(step) && options_.announce) {
    log_info("profile {}; open {} in chrome://tracing or Perfetto", to_text(profiler_->result()),
             options_.trace_path);
  }
}

/// From here on the run is changed. Drops the records of steps that are made again, and completes a step that
/// was saved but not yet recorded; a run that was complete has nothing to add.
void Trainer::begin_records() {
  checkpoints_.take_over();
  const bool recorded = records_.begin();
  if (resumed_.record) resumed_.record->sources = parts_.data->sources_in(parts_.samples_in(resumed_.step));
  const bool is_lost = resumed_.record && !comm::any_rank(*parts_.mesh.all, parts_.is_root() && recorded);
  if (!is_lost) return validations_.catch_up(resumed_.record.value_or(StepRecord{.step = resumed_.step}));
  complete(*resumed_.record, resumed_.step == agenda_.last_step());
}

/// Records what is under way but for the `left` newest steps; all of it once a step has seen a stop signal.
void Trainer::settle(size_t left) {
  while (steps_.count() > (agenda_.is_stopped() ? 0 : left)) {
    StepRecord record = settle_oldest();
    const bool ends = agenda_.ends_after(record.step);
    if (steps_.empty() && agenda_.saves_after(record.step))
      record.checkpoint_ms = checkpoints_.save(record, ends);
    if (steps_.empty() && ends) keep_weights();
    complete(record, ends);
  }
}

StepRecord Trainer::settle_oldest() {
  auto [record, totals] = steps_.settle_oldest();
  agenda_.stop(totals.stop_signal);
  RunSummary& summary = records_.summary();
  if (record.step == agenda_.first_step()) summary.seconds_to_first_step = began_.seconds();
  record.sources = parts_.data->sources_in(parts_.samples_in(record.step));
  record.tflops_per_rank =
      1e-12 * parts_.facts.flops_per_token * record.tokens_per_s / static_cast<double>(parts_.world->size());
  for (const auto& callback : parts_.program.callbacks)
    call_of_program([&] { callback->on_step(record); }, "on_step() after step {} of a callback", record.step);
  if (config_.parallel.pp > 1)
    summary.peak_bytes_by_pp_rank.assign(totals.peak_by_pp_rank.begin(), totals.peak_by_pp_rank.end());
  return record;
}

/// What follows the save of a step: validation, and its record. `ends`: the run was known to end with the
/// step when it was saved.
void Trainer::complete(StepRecord& record, bool ends) {
  if (steps_.empty() && agenda_.validates_after(record.step)) validations_.validate(record);
  if (steps_.empty() && !ends && agenda_.ends_after(record.step)) end_early(record);
  records_.record(record);
}

/// A stop signal came in the pause after the step, or its validation ends the run.
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
  const bool adapters = plan::has_adapters(config_);
  if (!config_.checkpoint.final_weights && !adapters) return;
  try {
    if (adapters) model_.save_adapter(adapter_folder(options_.weights_path), parts_.base_digest);
    if (config_.checkpoint.final_weights) model_.save_weights(options_.weights_path);
  } catch (const EnvironmentError&) {
    weights_error_ = std::current_exception();
  }
}

void Trainer::report_pipeline() {
  const std::optional<plan::PipelineReport> report = model_.passes().step_report();
  model_.passes().report_steps(false);
  if (parts_.is_root() && report && options_.show_pipeline) options_.show_pipeline(*report);
}

TrainResult Trainer::finish() {
  RunSummary& summary = records_.summary();
  keep_weights();
  if (weights_error_) std::rethrow_exception(weights_error_);
  summary.weights_digest = model_.weights_digest();
  summary.why_bits_vary = why_bits_vary(parts_);
  summary.cost = run_cost(parts_, {.wire_bytes = steps_.bytes_in_full_step(),
                                   .copy_bytes = checkpoints_.copy_bytes(),
                                   .baseline_bytes = baseline_bytes_,
                                   .communication = steps_.last_times()});
  if (config_.train.sample_tokens > 0 && !agenda_.is_stopped()) summary.sample = sample();
  agenda_.stop(signal_of_any_rank(options_, parts_.mesh));
  summary.stop_signal = agenda_.stop_signal();
  if (agenda_.ends_now()) summary.early_end = validations_.end();
  checkpoints_.finish();  // where the last step could not be saved, one before it may be under way
  summary.checkpoints = checkpoints_.written();
  summary.checkpoints_late = checkpoints_.late();
  summary.checkpoints_failed = checkpoints_.failed();
  const bool resumable = agenda_.is_stopped() && (resumed_.step > 0 || checkpoints_.has_written());
  if (config_.checkpoint.final_weights) summary.weights_path = options_.weights_path;
  if (const std::optional<BestWeights>& best = validations_.best(); best && best->step() > 0) {
    summary.best_weights_path = best->path();
    summary.best_step = best->step();
  }
  if (profiler_ && profiler_->result().steps > 0) summary.profile = profiler_->result();
  records_.finish();
  return {.summary = summary, .stop_signal = agenda_.stop_signal(), .resumable = resumable};
}

std::string Trainer::sample() {
  const data::Tokenizer& tokenizer = *parts_.data->tokenizer();
  const std::vector<int32_t> prompt = tokenizer.encode(config_.train.sample_prompt);
  if (prompt.empty()) return config_.train.sample_prompt;  // of characters that its tokenizer drops
  const auto told_to_stop = [this] { return signal_of_any_rank(options_, parts_.mesh) != 0; };
  const std::vector<int32_t> tokens = model_.generate(prompt, {.max_tokens = config_.train.sample_tokens,
                                                               .vocab_size = tokenizer.vocab_size(),
                                                               .end_token = tokenizer.end_token(),
                                                               .seed = static_cast<uint64_t>(config_.seed),
                                                               .context = config_.data.seq_len,
                                                               .gives_up = told_to_stop});
  return config_.train.sample_prompt + data::decode_after(tokenizer, prompt, tokens);
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

/// Errors of torch in words of ours.
template <typename Body>
void in_our_words(const plan::Config& config, const comm::World& world, const Body& body) {
  const plan::Device device = world.device().is_cuda() ? plan::Device::kCuda : plan::Device::kCpu;
  try {
    body();
  } catch (const c10::OutOfMemoryError& error) {
    throw OutOfMemory("[train] the device is out of memory: {}. {}", error.what_without_backtrace(),
                      plan::memory_advice(config, world.size(), device));
  } catch (const std::exception& error) {
    if (is_out_of_host_memory(error)) {
      throw OutOfMemory("[train] the host is out of memory. {}",
                        plan::memory_advice(config, world.size(), device));
    }
    refuse_indeterminism(error);
    throw;
  }
}

/// The options with what depends on the device settled, and memory enough for them.
TrainOptions settled(const TrainOptions& given, comm::World& world) {
  check_same_config(given.config, world);
  TrainOptions options = given;
  const plan::Device device = world.device().is_cuda() ? plan::Device::kCuda : plan::Device::kCpu;
  options.config = plan::settle_recompute(settle_fp8(given.config, world), device);
  check_enough_memory(options, world);
  make_threads();
  return options;
}

/// Whether kernels are chosen by measuring them.
bool tunes(const plan::TrainConfig& config) {
  return config.tune_matmul && !config.deterministic;
}

/// Settings of this process and this thread while a run lives.
struct Surroundings {
  Surroundings(const plan::Config& config, const comm::World& world)
      : repeatable(config.train.deterministic),
        tuning(tunes(config.train)),
        convolutions(tunes(config.train) && world.device().is_cuda() &&
                     plan::reads_images(config.model.family)),
        records_passes(can_record(config, world)) {
    if (!records_passes) return;
    kernels::synchronize_gpu();  // of what was enqueued elsewhere so far
    stream.emplace(parallel::recording_stream(world.device()));
  }

  const kernels::Repeatable repeatable;
  const kernels::MatmulTuning tuning;
  const kernels::TunedConvolutions convolutions;
  const bool records_passes;
  std::optional<c10::StreamGuard> stream;  // this thread's while it trains
};

}  // namespace

class Run::Impl {
 public:
  Impl(const TrainOptions& options, std::shared_ptr<comm::World> world)
      : given_(options.config), world_(std::move(world)) {
    guarded([&] {
      options_ = settled(options, *world_);
      const int64_t baseline = world_->device().is_cuda() ? 0 : kernels::resident_peak();
      surroundings_.emplace(options_.config, *world_);
      trainer_.emplace(options_, world_, surroundings_->records_passes, baseline);
      trainer_->begin();
    });
  }

  bool is_over() const { return stopped_ != 0 || trainer_->is_over(); }

  void step(int64_t count) {
    guarded([&] {
      for (int64_t i = 0; i < count && !is_over(); ++i) trainer_->make_step();
    });
  }

  TrainResult finish() {
    TrainResult result;
    if (stopped_ == 0) guarded([&] { result = trainer_->finish(); });
    if (stopped_ == 0) return result;
    return {.summary = {}, .stop_signal = stopped_};
  }

 private:
  template <typename Body>
  void guarded(const Body& body) {
    in_our_words(given_, *world_, [&] {
      try {
        body();
      } catch (const Stopped& stopped) {
        stopped_ = stopped.signal();
      } catch (const CommError&) {
        if (trainer_) trainer_->give_up();
        throw;
      }
    });
  }

  plan::Config given_;
  std::shared_ptr<comm::World> world_;
  TrainOptions options_;
  std::optional<Surroundings> surroundings_;
  std::optional<Trainer> trainer_;
  int stopped_ = 0;  ///< the signal that ended the run before its first step
};

Run::Run(const TrainOptions& options, std::shared_ptr<comm::World> world)
    : impl_(std::make_unique<Impl>(options, std::move(world))) {}
Run::~Run() = default;

bool Run::is_over() const {
  return impl_->is_over();
}

void Run::step(int64_t count) {
  impl_->step(count);
}

TrainResult Run::finish() {
  return impl_->finish();
}

TrainResult train(const TrainOptions& options, std::shared_ptr<comm::World> world) {
  Run run(options, std::move(world));
  while (!run.is_over()) run.step(1);
  return run.finish();
}

}  // namespace trireme::train
