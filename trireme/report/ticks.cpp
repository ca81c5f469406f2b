#include "trireme/report/ticks.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "trireme/base/text.h"

namespace trireme::report {
namespace {

/// The factor of an axis' labels, and the letters behind them.
struct Scale {
  double factor = 1.0;
  std::string letter;  ///< behind each label
  std::string suffix;  ///< of the axis
};

Scale scale_of(Unit unit, double high) {
  const double size = std::fabs(high);
  const auto power = [&](double base, int most) {
    int count = 0;
    while (count < most && size >= std::pow(base, count + 1)) ++count;
    return count;
  };
  switch (unit) {
    case Unit::kNumber:
      return {};
    case Unit::kCount: {
      const int count = power(1000.0, 4);
      return {std::pow(1000.0, count), std::string(count == 0 ? "" : std::string(1, "kMBT"[count - 1])), ""};
    }
    case Unit::kBytes: {
      constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
      const int count = power(1024.0, 4);
      return {std::pow(1024.0, count), "", kUnits[count]};
    }
    case Unit::kMilliseconds:
      return size >= 1e4 ? Scale{1e3, "", "s"} : Scale{1.0, "", "ms"};
    case Unit::kSeconds:
      return size >= 7200.0  ? Scale{3600.0, "", "hours"}
             : size >= 300.0 ? Scale{60.0, "", "minutes"}
                             : Scale{1.0, "", "s"};
    case Unit::kShare:
      return {0.01, "%", ""};
  }
  return {};
}

double round_step(double range, int64_t most) {
  const double least = range / static_cast<double>(std::max<int64_t>(most, 1));
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1.0 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

std::vector<double> multiples(double low, double high, double step) {
  std::vector<double> ticks;
  const double slack = 1e-9;
  const double first = std::ceil(low / step - slack), last = std::floor(high / step + slack);
  for (double i = first; i <= last; i += 1.0) ticks.push_back(i * step);
  return ticks;
}

/// Powers of 10 from `low` to `high`, so that there are at most about `most`, and where these are few what
/// lies between them.
std::vector<double> log_ticks(double low, double high, int64_t most) {
  const double slack = 1e-9;
  const auto first = static_cast<int>(std::floor(std::log10(low) + slack)),
             last = static_cast<int>(std::ceil(std::log10(high) - slack));
  const auto ticks_of = [&](std::span<const double> factors, int stride) {
    std::vector<double> ticks;
    for (int power = first; power <= last; power += stride) {
      for (const double factor : factors) {
        const double tick = factor * std::pow(10.0, power);
        if (tick >= low * (1.0 - slack) && tick <= high * (1.0 + slack)) ticks.push_back(tick);
      }
    }
    return ticks;
  };
  constexpr double kRound[] = {1.0, 2.0, 5.0}, kPowers[] = {1.0};
  std::vector<double> between = ticks_of(kRound, 1);
  if (std::ssize(between) <= most) return between;
  const int64_t least = std::max<int64_t>(most, 1);
  return ticks_of(kPowers, std::max(1, static_cast<int>((last - first + least) / least)));
}

/// A range that is none gets some room around it.
void widen(double& low, double& high) {
  if (high > low && std::isfinite(high - low) &&
      high - low > 1e-12 * std::max(std::fabs(low), std::fabs(high)))
    return;
  const double room = low == 0.0 ? 1.0 : 0.05 * std::fabs(low);
  low -= room;
  high += room;
}

Axis log_axis(double low, double high, const AxisOptions& options) {
  Axis axis{.low = low, .high = high, .log = true, .ticks = {}, .labels = {}, .suffix = {}};
  if (high < 1.05 * low) {
    axis.low = low / 1.1;
    axis.high = high * 1.1;
  }
  axis.ticks = log_ticks(axis.low, axis.high, options.most_ticks);
  return axis;
}

Axis linear_axis(double low, double high, const AxisOptions& options, double factor) {
  if (options.from_zero) low = std::min(low, 0.0);
  const bool share = options.unit == Unit::kShare && low >= 0.0 && high <= 1.0;
  widen(low, high);
  if (share) {
    low = std::max(low, 0.0);
    high = std::min(high, 1.0);
  }
  Axis axis{.low = low, .high = high, .log = false, .ticks = {}, .labels = {}, .suffix = {}};
  double step = round_step((high - low) / factor, options.most_ticks - 1) * factor;
  if (options.unit == Unit::kCount) step = std::max(step, 1.0);  // there are no halves of steps
  if (options.round_ends) {
    const double slack = 1e-9;
    axis.low = std::floor(low / step + slack) * step;
    axis.high = std::ceil(high / step - slack) * step;
  }
  axis.ticks = multiples(axis.low, axis.high, step);
  return axis;
}

/// Four digits: 3.121, 10.83, 123.5, 1.2e-05.
std::string plain_number(double value) {
  const double size = std::fabs(value);
  if (size != 0.0 && (size < 1e-3 || size >= 1e6)) return fmt::format("{:.3g}", value);
  return fmt::format("{:.{}f}", value, size < 9.99995 ? 4 : size < 99.9995 ? 3 : size < 999.995 ? 2 : 1);
}

}  // namespace

double Axis::place(double value) const {
  if (log) return (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
  return (value - low) / (high - low);
}

Axis make_axis(double low, double high, const AxisOptions& options) {
  const Scale scale = scale_of(options.unit, std::max(std::fabs(low), std::fabs(high)));
  Axis axis = options.log ? log_axis(low, high, options) : linear_axis(low, high, options, scale.factor);
  axis.suffix = scale.suffix;
  for (double& tick : axis.ticks) {
    if (std::fabs(tick) < 1e-12 * (axis.high - axis.low)) tick = 0.0;
    axis.labels.push_back(
        fmt::format("{:.6g}{}", tick / scale.factor, tick == 0.0 && scale.letter != "%" ? "" : scale.letter));
  }
  return axis;
}

std::string format_value(Unit unit, double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Inf" : "-Inf";
  switch (unit) {
    case Unit::kNumber:
      return plain_number(value);
    case Unit::kCount:
      return format_count(value);
    case Unit::kBytes:
      return format_bytes(value);
    case Unit::kMilliseconds:
      return format_duration(1e-3 * value);
    case Unit::kSeconds:
      return format_duration(value);
    case Unit::kShare:
      return fmt::format("{:.{}f}%", 100.0 * value, std::fabs(value) < 0.00995 ? 2 : 1);
  }
  return "";
}

}  // namespace trireme::report
