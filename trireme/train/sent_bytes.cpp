#include "trireme/train/sent_bytes.h"

#include <algorithm>

#include "trireme/plan/cuda_graphs.h"

namespace trireme::train {

void SentBytes::begin_step() {
  before_ = parts_.model->sent_bytes();
  stayed_ = parts_.model->stays_in_place();
}

/// Steps before hooks start, or before units keep their memory, are not those of the run, nor is the first,
/// in which ranks agree on more, where another one begins like it.
void SentBytes::end_step(int64_t step) {
  const int64_t sent = parts_.model->sent_bytes() - before_;
  const int64_t samples = parts_.samples_in(step) - parts_.samples_in(step - 1);
  const bool is_full = samples == parts_.batch.global_batch && !agenda_.validates_after(step - 1);
  const bool replaces = begins_anew_ || (counts_first_ && is_full);
  const plan::ParallelConfig& parallel = parts_.config.parallel;
  const bool hook_starts = plan::starts_late(parallel.comm_hook) && step == parallel.hook_start;
  const bool changes = hook_starts || stayed_ != parts_.model->stays_in_place();
  if (decides_in(step)) {
    begins_anew_ = begins_anew_ || changes;
    return;
  }
  in_full_step_ = replaces ? sent : std::max(in_full_step_, sent);
  counts_first_ = step == agenda_.first_step() || (counts_first_ && !replaces);
  begins_anew_ = changes;
}

bool SentBytes::decides_in(int64_t step) const {
  return step == agenda_.first_step() + plan::kStepsBeforeRecording;
}

}  // namespace trireme::train
