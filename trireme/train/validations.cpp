#include "trireme/train/validations.h"

#include <iterator>

#include "trireme/train/stop.h"

namespace trireme::train {

Validations::Validations(Parts& parts, Checkpointing& checkpoints, Agenda& agenda, int64_t resumed_at)
    : parts_(parts), config_(parts.config), checkpoints_(checkpoints), agenda_(agenda) {
  if (config_.checkpoint.best && parts.validates)
    best_.emplace(parts.options.best_weights_path, resumed_at, parts.mesh);
}

void Validations::validate(StepRecord& record) {
  std::optional<Guesses> guesses;
  const bool may_end = record.step == agenda_.last_step() || parts_.early_stop.is_on();
  if (parts_.data->has_labels() && may_end) guesses.emplace(std::ssize(parts_.data->classes()));
  const std::optional<Validation> found = measure(record.step, guesses ? &*guesses : nullptr);
  if (!found) return;
  watch(record.step, found->loss);
  if (guesses && agenda_.ends_after(record.step)) show(*guesses, record.step);
  record.val_loss = found->loss;
  record.val_top1 = found->top1;
  record.val_top5 = found->top5;
}

void Validations::catch_up(int64_t step) {
  EarlyStop& early_stop = parts_.early_stop;
  if (step == 0 || !early_stop.is_on()) return;
  if (early_stop.last_seen() < step && agenda_.validates_after(step)) {
    const std::optional<Validation> found = measure(step, nullptr);
    if (found) early_stop.see(step, found->loss);
  }
  end_if_due(step);
}

void Validations::watch(int64_t step, double val_loss) {
  EarlyStop& early_stop = parts_.early_stop;
  if (!early_stop.is_on()) return;
  if (early_stop.last_seen() < step) early_stop.see(step, val_loss);  // else a lost record is made again
  end_if_due(step);
}

/// A run that has come to its last step ends anyway.
void Validations::end_if_due(int64_t step) {
  const EarlyStop& early_stop = parts_.early_stop;
  if (early_stop.end() && step < agenda_.last_step()) agenda_.end_now();
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
