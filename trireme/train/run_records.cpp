#include "trireme/train/run_records.h"

#include <algorithm>
#include <numeric>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::train {
namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

RunRecords::RunRecords(const Parts& parts, int64_t resumed_at, double loss)
    : parts_(parts),
      sinks_(parts.is_root() ? parts.options.sinks : std::vector<Sink*>()),
      lost_(sinks_.size(), 0),
      started_(monotonic_seconds()) {
  summary_.steps = summary_.resumed_at = resumed_at;
  summary_.final_loss = loss;
}

bool RunRecords::begin() {
  started_ = monotonic_seconds();
  bool recorded = true;
  for (Sink* sink : sinks_) {
    sink->begin(parts_.config.train.steps);
    if (parts_.options.resume) recorded &= sink->resume(summary_.resumed_at);
  }
  return recorded;
}

void RunRecords::record(const StepRecord& step) {
  if (step.step > summary_.resumed_at) step_seconds_.push_back(step.step_ms * 1e-3);
  summary_.steps = step.step;
  summary_.final_loss = step.loss;
  summary_.peak_bytes = step.peak_bytes;
  summary_.active_bytes = step.active_bytes;
  summary_.reserved_bytes = step.reserved_bytes;
  if (step.val_loss) summary_.final_val_loss = step.val_loss;
  if (step.val_top1) summary_.final_val_top1 = step.val_top1;
  if (step.val_top5) summary_.final_val_top5 = step.val_top5;
  if (!step.sources.empty()) summary_.sources = step.sources;
  if (step.val_loss) summary_.final_val_metrics = step.val_metrics;
  for (size_t i = 0; i < sinks_.size(); ++i) {
    try {
      sinks_[i]->record(step);
    } catch (const EnvironmentError& error) {
      if (lost_[i]++ == 0)
        log_warning("step {} is not recorded: {}; training continues", step.step, error.what());
    }
  }
}

void RunRecords::report_lost() const {
  const int64_t lost = std::accumulate(lost_.begin(), lost_.end(), int64_t{0});
  if (lost > 0) log_warning("{} step records could not be written; the weights are complete", lost);
}

void RunRecords::finish() {
  // A run that was stopped early leaves out less, so that it has a speed as well.
  const int64_t warmup = std::min(kWarmupSteps, std::ssize(step_seconds_) / 2);
  if (const double seconds = median({step_seconds_.begin() + warmup, step_seconds_.end()}); seconds > 0.0) {
    summary_.steps_per_s = 1.0 / seconds;
    summary_.tokens_per_s =
        static_cast<double>(parts_.batch.global_batch * parts_.config.data.seq_len) / seconds;
  }
  summary_.wall_s = monotonic_seconds() - started_;
  report_lost();
  for (Sink* sink : sinks_) sink->finish(summary_);
}

}  // namespace trireme::train
