#pragma once
// Ratios of runs that stood beside each other, and the verdict that they bear.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/bench/sample.h"
#include "trireme/bench/target.h"
#include "trireme/report/step_times.h"

namespace trireme::bench {

enum class Verdict { kReference, kFaster, kSlower, kNoDifference, kBlocked };
std::string verdict_text(Verdict verdict);

/// One number a run: the statistic of its steady steps, in milliseconds.
double value_of(const Sample& sample, Statistic statistic, int64_t warm_up);

/// The values of an arm's runs, and their ratios. Steps of a run depend on each other, so that only runs are
/// counted.
struct Score {
  std::vector<double> values;  ///< milliseconds a step, a run each
  double median_ms = 0.0;
  /// The reference's value over this arm's, of runs in the same half of a block: above 1, this arm is faster.
  /// Empty for the reference itself.
  std::vector<double> ratios;
  double ratio = 0.0;         ///< the median; 0: there is none
  report::Interval interval;  ///< from the smallest ratio to the largest
  Verdict verdict = Verdict::kReference;
};

/// "slower", or "perhaps slower" where there are too few ratios for an interval that holds in 95% of cases.
std::string verdict_text(const Score& score);

/// A score an arm. `holds`: the runs may be compared; else there are no ratios, and the verdict is kBlocked.
std::vector<Score> score(const std::vector<Arm>& arms, const std::vector<Sample>& samples,
                         Statistic statistic, int64_t warm_up, bool holds);

/// The share of sets of so many ratios whose smallest and largest have the true median between them, where
/// each is as likely to be above it as below: 1 - 2^(1 - count).
double coverage(size_t ratios);

}  // namespace trireme::bench
