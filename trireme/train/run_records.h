#pragma once
// What a run tells of itself: each step to the sinks of rank 0, and at the end a summary.
#include <cstdint>
#include <vector>

#include "trireme/base/sink.h"
#include "trireme/train/parts.h"

namespace trireme::train {

/// Steps at the start of a run that its speed leaves out.
inline constexpr int64_t kWarmupSteps = 10;

class RunRecords {
 public:
  /// The records of a run that goes on after step `resumed_at`, whose loss was `loss`; 0: the run begins.
  /// `parts` must outlive this.
  RunRecords(const Parts& parts, int64_t resumed_at, double loss);

  /// Sinks void what they have recorded of later steps. Returns false when one lacks the step after which the
  /// run goes on.
  bool begin();
  /// A sink that cannot record is a warning, the first time.
  void record(const StepRecord& step);
  /// Completes the summary with the speed of the recorded steps, and hands it to the sinks.
  void finish();

  RunSummary& summary() { return summary_; }

 private:
  void report_lost() const;

  const Parts& parts_;
  const std::vector<Sink*> sinks_;  ///< of rank 0
  RunSummary summary_;
  std::vector<int64_t> lost_;         ///< records, by sink
  std::vector<double> step_seconds_;  ///< of all steps
  double started_;
};

}  // namespace trireme::train
