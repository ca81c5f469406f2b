#pragma once
// The steps of a run, each from its batches to the update of the weights: enqueued by the host, and settled
// when their totals have arrived. On a GPU the host may be a step ahead of the totals that it has read.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "trireme/base/sink.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/train/agenda.h"
#include "trireme/train/checkpointing.h"
#include "trireme/train/moment.h"
#include "trireme/train/parts.h"
#include "trireme/train/sent_bytes.h"
#include "trireme/train/totals.h"

namespace trireme::train {

class StepsUnderWay {
 public:
  /// All must outlive this.
  StepsUnderWay(Parts& parts, precision::LossScaler& scaler, Checkpointing& checkpoints,
                const Agenda& agenda);

  /// Whether the next step is enqueued before the totals of this one are read.
  bool run_ahead() const { return runs_ahead_; }
  /// Fetch, forward and backward of each micro-batch, norm, clip, update. Throws NumericsError as
  /// settle_oldest() does where the host looks at the norm before the update. Collective.
  void enqueue(int64_t index);

  struct Settled {
    StepRecord record;  ///< without what follows the step: its save and validation
    StepTotals totals;
  };
  /// Waits for the totals of the oldest step. Throws NumericsError when they are not finite.
  Settled settle_oldest();
  size_t count() const { return under_way_.size(); }
  bool empty() const { return under_way_.empty(); }

  /// What follows until the next step is enqueued counts for none.
  void pause() { since_.reset(); }

  int64_t bytes_in_full_step() const { return sent_.in_full_step(); }
  /// Of the step that was settled last; none: it was not timed.
  const std::optional<parallel::CommTimes>& last_times() const { return last_times_; }

 private:
  /// Its work is enqueued. Its totals are on their way, or have been read.
  struct Step {
    int64_t index = 0;
    double lr = 0.0;
    double loss_scale = 1.0;
    bool applied = true;
    std::optional<TotalsOnTheWay> arriving = {};
    std::optional<Moment> over = {};
    std::optional<parallel::CommTimes> communication = {};  ///< until then; on a GPU none
    StepTotals totals = {};
  };

  Step begin(int64_t index);
  void end(Step&& step);
  void end_time_of(Step& step);
  void update_at_once(Step& step, const at::Tensor& rows);
  void update_if_finite(Step& step, const at::Tensor& rows);
  void check_finite(const Step& step) const;
  std::string where_not_finite(const StepTotals& totals) const;
  void report_overflow(const Step& step) const;
  StepRecord record_of(const Step& step, double seconds) const;

  Parts& parts_;
  const plan::Config& config_;
  TrainedModel& model_;
  precision::LossScaler& scaler_;
  Checkpointing& checkpoints_;
  const Agenda& agenda_;
  SentBytes sent_;
  bool runs_ahead_;
  std::deque<Step> under_way_;   ///< that nobody has heard of yet; at most two
  std::optional<Moment> since_;  ///< when the last of the others was over; none: there was a pause
  std::optional<parallel::CommTimes> last_times_;
};

}  // namespace trireme::train
