#include "trireme/report/curve.h"

#include <algorithm>
#include <cmath>

namespace trireme::report {
namespace {

Bin empty_bin(double x) {
  return {.first = x, .last = x, .low = 0.0, .high = 0.0, .mean = 0.0, .count = 0, .not_finite = 0};
}

/// The mean is that of all points so far.
void add_point(Bin& bin, double x, double y) {
  bin.last = x;
  if (!std::isfinite(y)) {
    ++bin.not_finite;
    return;
  }
  bin.low = bin.count == 0 ? y : std::min(bin.low, y);
  bin.high = bin.count == 0 ? y : std::max(bin.high, y);
  ++bin.count;
  bin.mean += (y - bin.mean) / static_cast<double>(bin.count);
}

}  // namespace

std::vector<Bin> bins_of(const Curve& curve, size_t most) {
  std::vector<Bin> bins;
  if (curve.empty()) return bins;
  const bool each = curve.size() <= most;
  const double begin = curve.x.front(), width = (curve.x.back() - begin) / static_cast<double>(most);
  size_t current = 0;
  for (size_t i = 0; i < curve.size(); ++i) {
    const size_t part = each ? i : std::min(most - 1, static_cast<size_t>((curve.x[i] - begin) / width));
    if (bins.empty() || part != current) bins.push_back(empty_bin(curve.x[i]));
    current = part;
    add_point(bins.back(), curve.x[i], curve.y[i]);
  }
  return bins;
}

std::optional<double> quantile(std::vector<double> values, double share) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::nullopt;
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::ptrdiff_t>(place);
  const auto at = values.begin() + below;
  std::ranges::nth_element(values, at);
  const double low = *at;
  if (at + 1 == values.end()) return low;
  const double high = *std::min_element(at + 1, values.end());
  return low + (place - static_cast<double>(below)) * (high - low);
}

}  // namespace trireme::report
