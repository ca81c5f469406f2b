#pragma once
// The figures that a run comes down to, and how it ended: what a page and a comparison show first.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/report/run_record.h"
#include "trireme/report/step_times.h"

namespace trireme::report {

enum class RunState {
  kFinished,
  kInterrupted,  ///< by a signal that it heeded: it can go on
  kFailed,
  kRunning,
  kNoEnd  ///< it still goes on without saving, or was killed with its launcher
};
RunState state_of_run(const RunRecord& run);
/// "finished", "interrupted", "failed", "running", "no end recorded".
std::string state_name(RunState state);

/// A value and the step that it was measured at.
struct AtStep {
  double value = 0.0, step = 0.0;
};

struct RunFigures {
  int64_t steps = 0;                   ///< the last that was recorded
  std::optional<int64_t> total_steps;  ///< that the config asks for; none: it asks for epochs
  std::optional<double> loss;          ///< of the last step
  std::optional<AtStep> val_loss, best_val_loss;
  std::optional<AtStep> val_top1, val_top5, best_val_top1;  ///< shares
  /// Medians over steps after the warm-up; tokens_range: from the 5% to the 95% quantile of tokens_per_s.
  std::optional<double> tokens_per_s, step_ms, step_ms_p95, communication_ms, exposed_ms, exposed_share;
  std::optional<Interval> tokens_range;
  int64_t timed_steps = 0;  ///< steps after the warm-up
  int64_t tokens = 0;       ///< trained on
  int64_t peak_bytes = 0;
  double wall_s = 0.0;  ///< of the last attempt; 0: it has written no summary
  std::string weights_digest, why_bits_vary;
};
RunFigures figures_of(const RunRecord& run);

/// Whether top-5 says anything: among five classes or fewer it is always 100%.
bool top5_tells(const RunRecord& run);

/// The values of `curve` at steps after the warm-up: without the first ten steps, or half of them where these
/// are fewer, after each beginning of the run. They are what the run's own tokens_per_s is the median of.
std::vector<double> settled_values(const RunRecord& run, const Curve& curve);

}  // namespace trireme::report
