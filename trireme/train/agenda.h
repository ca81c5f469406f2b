#pragma once
// What a run does around each of its steps: which it measures, after which it validates, saves, waits or
// ends. All ranks answer alike, so that they meet in the same collectives.
#include <cstdint>

#include "trireme/train/checkpointing.h"
#include "trireme/train/parts.h"

namespace trireme::train {

class Agenda {
 public:
  /// Of a run that goes on after step `resumed_at`; 0: it begins. `parts` and `checkpoints` must outlive
  /// this.
  Agenda(const Parts& parts, const Checkpointing& checkpoints, int64_t resumed_at);

  int64_t first_step() const { return resumed_at_ + 1; }
  int64_t last_step() const { return config_.train.steps; }

  /// A signal that ends the run, the same on all ranks. The first one counts; 0 is none.
  void stop(int signal) {
    if (stop_signal_ == 0) stop_signal_ = signal;
  }
  int stop_signal() const { return stop_signal_; }
  bool is_stopped() const { return stop_signal_ != 0; }

  /// The run ends well with the step that was made last.
  void end_now() { ends_now_ = true; }
  bool ends_now() const { return ends_now_; }
  /// Whether no further step is made.
  bool is_over() const { return is_stopped() || ends_now_; }

  bool ends_after(int64_t step) const { return step == last_step() || is_over(); }
  bool validates_after(int64_t step) const;
  bool saves_after(int64_t step) const;
  /// Whether something else than a step follows, which wants the device for itself.
  bool pauses_after(int64_t step) const;
  /// Whether the host goes on only when this step is over, although it may run ahead: it is the last, its end
  /// is measured, or a pause follows. Ranks would otherwise see a stop signal at different steps.
  bool waits_for(int64_t step) const;

  bool times_communication(int64_t step) const;
  bool measures_activations(int64_t step) const;
  int64_t profiled_steps() const { return profiled_; }  ///< that rank 0 traces
  int64_t first_profiled() const { return first_profiled_; }
  /// Whether it is the step of a pipeline that all ranks record.
  bool records_pipeline(int64_t step) const;

 private:
  const Parts& parts_;
  const plan::Config& config_;
  const Checkpointing& checkpoints_;
  int64_t resumed_at_;
  int64_t profiled_, first_profiled_;
  int stop_signal_ = 0;
  bool ends_now_ = false;
};

}  // namespace trireme::train
