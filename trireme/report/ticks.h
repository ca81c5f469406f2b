#pragma once
// Axes: the range that is shown, and the round numbers on it.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::report {

/// The unit of numbers on an axis or in a tooltip.
enum class Unit { kNumber, kCount, kBytes, kMilliseconds, kSeconds, kShare };

struct Axis {
  double low = 0.0, high = 1.0;
  bool log = false;
  std::vector<double> ticks;
  std::vector<std::string> labels;  ///< of the ticks
  std::string suffix;               ///< what the labels count: "MiB", "ms"; empty: they say it
  /// 0 at `low`, 1 at `high`. On an axis that is log `value` must be positive.
  double place(double value) const;
};

struct AxisOptions {
  Unit unit = Unit::kNumber;
  bool log = false;
  bool from_zero = false;
  bool round_ends = true;  ///< the axis ends at ticks; else where the values do
  int64_t most_ticks = 6;
};

/// An axis for values from `low` to `high`, finite, and on one that is log positive. Ticks are 1, 2 or 5
/// times a power of 10 of what the labels count, of counts at least 1 apart; shares end at 0% and 100%; over
/// several decades of a log axis powers of 10 alone.
Axis make_axis(double low, double high, const AxisOptions& options);

/// A value for people, in the form of the console: three or four digits and the unit.
std::string format_value(Unit unit, double value);

}  // namespace trireme::report
