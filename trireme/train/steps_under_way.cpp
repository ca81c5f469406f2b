#include "trireme/train/steps_under_way.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/optim/learning_rate.h"
#include "trireme/plan/cuda_graphs.h"

namespace trireme::train {
namespace {

/// Overflows in a row after which a smaller loss scale will not help either.
constexpr int64_t kMostOverflowsInARow = 64;

}  // namespace

StepsUnderWay::StepsUnderWay(Parts& parts, precision::LossScaler& scaler, Checkpointing& checkpoints,
                             const Agenda& agenda)
    : parts_(parts),
      config_(parts.config),
      model_(*parts.model),
      scaler_(scaler),
      checkpoints_(checkpoints),
      agenda_(agenda),
      sent_(parts, agenda),
      runs_ahead_(parts.options.run_ahead.value_or(parts.on_gpu()) && !scaler.enabled()) {}

void StepsUnderWay::enqueue(int64_t index) {
  Step step = begin(index);
  const at::Tensor loss = model_.run_passes(parts_.next_batch, step.loss_scale);
  const at::Tensor rows = gather_totals(parts_, loss);
  runs_ahead_ ? update_at_once(step, rows) : update_if_finite(step, rows);
  end(std::move(step));
}

StepsUnderWay::Step StepsUnderWay::begin(int64_t index) {
  if (!since_) {
    since_.emplace(parts_.world->device());
    model_.take_times();  // of the update before the pause
  }
  model_.measure(agenda_.times_communication(index));
  model_.passes().measure_activations(agenda_.measures_activations(index));
  sent_.begin_step();
  return {.index = index,
          .lr = optim::learning_rate(config_.optim, index, config_.train.steps),
          .loss_scale = scaler_.scale()};
}

void StepsUnderWay::end(Step&& step) {
  const int64_t index = step.index;
  sent_.end_step(index);
  model_.measure(false);
  under_way_.push_back(std::move(step));
  if (index == plan::kStepsBeforeRecording + 1 && model_.passes().recorded() > 0 && parts_.options.announce) {
    log_info("graphs  {} kinds of pass are recorded as CUDA graphs and replayed from now on",
             model_.passes().recorded());
  }
}

/// Ends the time of the step: what follows counts for the next one.
void StepsUnderWay::end_time_of(Step& step) {
  step.over.emplace(parts_.world->device());
  if (!parts_.on_gpu() && agenda_.times_communication(step.index)) step.communication = model_.take_times();
}

/// Clips and updates without a look at the norm. On a GPU the host does not wait.
void StepsUnderWay::update_at_once(Step& step, const at::Tensor& rows) {
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
void StepsUnderWay::update_if_finite(Step& step, const at::Tensor& rows) {
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

void StepsUnderWay::check_finite(const Step& step) const {
  const double loss = step.totals.loss, grad_norm = step.totals.grad_norm;
  const bool may_overflow = scaler_.enabled() && scaler_.overflows_in_a_row() < kMostOverflowsInARow;
  if (std::isfinite(loss) && (std::isfinite(grad_norm) || may_overflow)) return;
  throw NumericsError(
      "[train.step] step {}: loss {} or gradient norm {} is not finite{}; lower optim.lr (now {}), raise "
      "optim.warmup_steps or check the data",
      step.index, number_text(loss), number_text(grad_norm), where_not_finite(step.totals), config_.optim.lr);
}

std::string StepsUnderWay::where_not_finite(const StepTotals& totals) const {
  const std::string name = under_way_.empty() ? model_.nonfinite_parameter() : std::string();
  if (!name.empty()) return fmt::format(" (rank {}: the gradient of {})", parts_.world->rank(), name);
  // The gradients may be overwritten already; the totals have the unit's name.
  return runs_ahead_ && !totals.not_finite.empty() ? fmt::format(" ({})", totals.not_finite) : std::string();
}

/// Warns on ranks whose part of the gradient is not finite.
void StepsUnderWay::report_overflow(const Step& step) const {
  const std::string where = where_not_finite(step.totals);
  if (where.empty()) return;
  log_warning("step {}: gradients overflow at loss scale {:g}{}; skipping the step, the scale is now {:g}",
              step.index, step.loss_scale, where, scaler_.scale());
}

StepsUnderWay::Settled StepsUnderWay::settle_oldest() {
  Step step = std::move(under_way_.front());
  under_way_.pop_front();
  if (step.arriving) {
    step.totals = read_totals(parts_, step.arriving->wait(), step.loss_scale);
    check_finite(step);
  }
  last_times_ = step.communication;
  if (parts_.on_gpu() && agenda_.times_communication(step.index)) last_times_ = model_.take_times();
  const double seconds = step.over->seconds_after(*since_);
  since_ = std::move(step.over);
  return {record_of(step, seconds), std::move(step.totals)};
}

StepRecord StepsUnderWay::record_of(const Step& step, double seconds) const {
  const StepTotals& totals = step.totals;
  const auto tokens_in = [this](int64_t steps) { return parts_.samples_in(steps) * config_.data.seq_len; };
  const int64_t tokens = tokens_in(step.index);
  StepRecord record{.step = step.index,
                    .loss = totals.loss,
                    .grad_norm = totals.grad_norm,
                    .lr = step.lr,
                    .tokens = tokens,
                    .tokens_per_s = static_cast<double>(tokens - tokens_in(step.index - 1)) / seconds,
                    .step_ms = 1e3 * seconds,
                    .peak_bytes = static_cast<int64_t>(totals.peak_bytes),
                    .active_bytes = static_cast<int64_t>(totals.active_bytes),
                    .reserved_bytes = static_cast<int64_t>(totals.reserved_bytes),
                    .loss_scale = scaler_.enabled() ? std::optional(step.loss_scale) : std::nullopt,
                    .skipped = !step.applied,
                    .val_loss = std::nullopt};
  if (last_times_) {
    record.communication_ms = last_times_->busy_ms;
    record.exposed_ms = last_times_->exposed_ms;
  }
  return record;
}

}  // namespace trireme::train
