#include "trireme/train/agenda.h"

#include <algorithm>

#include "trireme/train/run_records.h"

namespace trireme::train {

Agenda::Agenda(const Parts& parts, const Checkpointing& checkpoints, int64_t resumed_at)
    : parts_(parts),
      config_(parts.config),
      checkpoints_(checkpoints),
      resumed_at_(resumed_at),
      profiled_(std::min(config_.train.profile_steps, config_.train.steps - resumed_at)),
      first_profiled_(std::min(resumed_at + kWarmupSteps, config_.train.steps - profiled_) + 1) {}

bool Agenda::validates_after(int64_t step) const {
  if (!parts_.validates || is_stopped()) return false;
  const int64_t every = config_.train.val_every;
  const bool is_due = every > 0 ? step % every == 0 : parts_.epoch_ends_with(step);
  return is_due || step == last_step();
}

bool Agenda::saves_after(int64_t step) const {
  return checkpoints_.is_due(step) || (checkpoints_.can_save(step) && ends_after(step));
}

bool Agenda::pauses_after(int64_t step) const {
  const bool profile_begins = profiled_ > 0 && step + 1 == first_profiled_;
  const bool profile_ends = profiled_ > 0 && step + 1 == first_profiled_ + profiled_;
  return validates_after(step) || saves_after(step) || profile_begins || profile_ends ||
         records_pipeline(step);
}

bool Agenda::waits_for(int64_t step) const {
  return step == first_step() || step == last_step() || pauses_after(step);
}

/// A rank alone communicates with nobody. On a GPU the times of one step are read while the next is under
/// way, which is then not timed.
bool Agenda::times_communication(int64_t step) const {
  if (parts_.mesh.dp->size() == 1) return false;
  if (!parts_.on_gpu() || step == last_step()) return true;
  const int64_t every = config_.train.log_every;
  return every > 1 && step % every == 0 && step + 1 != last_step();
}

/// Not of the first step, which also allocates memory that later steps use again; and of two, since the one
/// that ends an epoch may have fewer rows.
bool Agenda::measures_activations(int64_t step) const {
  const int64_t first = std::min(first_step() + 1, last_step());
  return profiled_ == 0 && (step == first || step == first + 1);
}

/// The step before the traced ones, if there is one: tracing takes time, and the tracer and the recorder
/// watch the allocator at the same place.
bool Agenda::records_pipeline(int64_t step) const {
  if (profiled_ == 0 || config_.parallel.pp == 1) return false;
  return step == std::max(first_profiled_ - 1, first_step());
}

}  // namespace trireme::train
