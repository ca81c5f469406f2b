#pragma once
// What a run at rising learning rates shows (Smith 2017, Cyclical Learning Rates for Training Neural
// Networks): below some rate the loss does not fall, then it falls, and above another one it rises.
#include <optional>
#include <string>

#include "trireme/report/curve.h"
#include "trireme/report/run_record.h"

namespace trireme::report {

struct LrRange {
  Curve loss;  ///< over learning rates
  Curve mean;  ///< of each step and its neighbours, a tenth of all that are finite; none where they end
  /// The rates where the mean falls fastest over their logarithm, and where it is lowest; none: it falls by
  /// no more than twice the deviation of the losses' noise.
  std::optional<double> steepest = {}, lowest = {};
  /// The first rate behind it with a mean above the first one by more than that, else with a loss that is not
  /// finite; none: there is none.
  std::optional<double> diverged = {};
};

/// `loss`: over rising positive rates.
LrRange lr_range_of(const Curve& loss);

/// The losses of a run over the learning rates of their steps.
Curve loss_over_lr(const RunRecord& run);

/// A page with the curve. `run`: as people type it.
std::string lr_range_page(const LrRange& range, const std::string& run);

}  // namespace trireme::report
