#include "trireme/train/validations.h"

#include <algorithm>
#include <iterator>

#include "trireme/comm/agree.h"
#include "trireme/train/program_call.h"
#include "trireme/train/stop.h"

namespace trireme::train {
namespace {

void note(const Validation& found, StepRecord& record) {
  record.val_loss = found.loss;
  record.val_top1 = found.top1;
  record.val_top5 = found.top5;
  record.val_metrics = found.metrics;
}

}  // namespace

Validations::Validations(Parts& parts, Checkpointing& checkpoints, Agenda& agenda, int64_t resumed_at)
    : parts_(parts),
      config_(parts.config),
      checkpoints_(checkpoints),
      agenda_(agenda),
      monitor_(monitor_of(parts.config, *parts.data, parts.program.metrics, "loss")) {
  if (!config_.checkpoint.best || !parts.validates) return;
  const char* const usual = parts.data->has_labels() ? "top1" : "loss";
  best_.emplace(parts.options.best_weights_path, resumed_at, parts.mesh,
                monitor_of(config_, *parts.data, parts.program.metrics, usual), parts.best);
}

void Validations::validate(StepRecord& record) {
  std::optional<Guesses> guesses;
  const bool may_end = record.step == agenda_.last_step() || parts_.validations_count();
  if (parts_.data->has_labels() && may_end) guesses.emplace(std::ssize(parts_.data->classes()));
  const std::optional<Validation> found = measure(record.step, guesses ? &*guesses : nullptr);
  if (!found) return;
  note(*found, record);
  watch(record, *found);
  if (guesses && agenda_.ends_after(record.step)) show(*guesses, record.step);
}

void Validations::catch_up(StepRecord record) {
  if (record.step == 0 || !parts_.validations_count()) return;
  if (parts_.is_new_validation(record.step) && agenda_.validates_after(record.step)) {
    if (const std::optional<Validation> found = measure(record.step, nullptr)) {
      note(*found, record);
      return watch(record, *found);
    }
  }
  end_if_due(record.step);
}

void Validations::watch(const StepRecord& record, const Validation& found) {
  EarlyStop& early_stop = parts_.early_stop;
  // Else a lost record is made again.
  if (early_stop.is_on() && early_stop.last_seen() < record.step)
    early_stop.see(record.step, monitor_.of(found));
  tell_callbacks(record);
  end_if_due(record.step);
}

/// Ranks may differ in what they want, but not in what they do.
void Validations::tell_callbacks(const StepRecord& record) {
  const auto& callbacks = parts_.program.callbacks;
  if (callbacks.empty() || parts_.callbacks.told_at >= record.step) return;
  parts_.callbacks.told_at = record.step;
  std::optional<std::string> reason;
  for (const auto& callback : callbacks) {
    const std::optional<std::string> its =
        call_of_program([&] { return callback->on_validation(record); },
                        "on_validation() after step {} of a callback", record.step);
    if (its && !reason) reason = its->empty() ? "a callback of the program ended it" : *its;
  }
  const auto have = comm::gather_scalars(*parts_.mesh.all, {reason ? 1.0 : 0.0});
  const auto first = std::ranges::find_if(have, [](const auto& rank) { return rank[0] != 0.0; });
  if (first == have.end()) return;
  parts_.callbacks.end_reason = comm::text_of(*parts_.mesh.all, first - have.begin(), reason.value_or(""));
}

std::optional<EarlyEnd> Validations::end() const {
  const CallbackCourse& course = parts_.callbacks;
  if (course.end_reason.empty()) return parts_.early_stop.end();
  return EarlyEnd{.step = course.told_at, .reason = course.end_reason};
}

/// A run that has come to its last step ends anyway.
void Validations::end_if_due(int64_t step) {
  if (end() && step < agenda_.last_step()) agenda_.end_now();
}

/// Of the weights that stand for the run, which are kept when they are the best so far.
std::optional<Validation> Validations::measure(int64_t step, Guesses* guesses) {
  const auto told_to_stop = [this] {
    agenda_.stop(signal_of_any_rank(parts_.options, parts_.mesh));
    return agenda_.is_stopped();
  };
  TrainedModel& model = *parts_.model;
  const bool averages = config_.optim.ema > 0.0;
  if (averages) {
    checkpoints_.before_update();
    model.swap_averages();
  }
  const auto found =
      train::validate(model, *parts_.data, config_.train.val_batches * parts_.batch.global_batch,
                      parts_.feed_options(), parts_.mesh, told_to_stop, guesses);
  if (found && best_) best_->keep(step, *found, model);
  if (averages) model.swap_averages();
  return found;
}

void Validations::show(const Guesses& guesses, int64_t step) const {
  Classification all = guesses.of_all_ranks(*parts_.mesh.all);
  if (!parts_.options.show_guesses) return;
  all.step = step;
  describe(all, *parts_.data);
  parts_.options.show_guesses(all);
}

}  // namespace trireme::train
