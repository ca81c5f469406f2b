#pragma once
// How long the steps of a run took, without its warm-up.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace trireme::report {

/// Fewer steps than these cannot tell how long one takes: the first ones do what later ones only use again.
inline constexpr size_t kLeastSteps = 5;

/// step_ms of metrics.jsonl of a run directory without its warm-up: the first quarter of the steps, but at
/// least two. Empty when the run has fewer than kLeastSteps. Throws DataError for a file that is not of this
/// format.
std::vector<double> steady_step_ms(const std::string& run_directory);

/// The median; half way between the two in the middle; none when there are no values.
std::optional<double> median(std::vector<double> values);

/// The 95% confidence interval of the median of the distribution that `values` were drawn from, whatever that
/// is: order statistics around the middle (Conover, Practical Nonparametric Statistics, 3.2). The values must
/// not depend on each other, as steps of one run do. Below kLeastForInterval values, which cannot say that
/// much, the smallest and the largest.
struct Interval {
  double low = 0.0, high = 0.0;
};
inline constexpr int64_t kLeastForInterval = 6;
std::optional<Interval> median_interval(std::vector<double> values);

}  // namespace trireme::report
