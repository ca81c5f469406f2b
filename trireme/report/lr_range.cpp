#include "trireme/report/lr_range.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "trireme/report/chart.h"
#include "trireme/report/page_parts.h"

namespace trireme::report {
namespace {

/// Neighbours of a step on each side that its mean takes in: with it a tenth of all.
size_t reach_of(const Curve& curve) {
  constexpr size_t kShare = 20;
  return curve.size() / kShare;
}

/// The means of the steps that have all their neighbours.
Curve mean_of(const Curve& curve, size_t reach) {
  Curve mean;
  for (size_t at = reach; at + reach < curve.size(); ++at) {
    double sum = 0.0;
    for (size_t i = at - reach; i <= at + reach; ++i) sum += curve.y[i];
    mean.add(curve.x[at], sum / static_cast<double>(2 * reach + 1));
  }
  return mean;
}

/// The deviation of the losses' noise: how far they are from the mean of their neighbours, over the first
/// half of them at least and as far as `calm` means, since a loss that diverges is wild.
double scatter_of(const Curve& curve, const Curve& mean, size_t reach, size_t calm) {
  constexpr double kDeviationOfMedian = 1.4826;  // of a normal distribution
  const size_t count = std::min(mean.size(), std::max(mean.size() / 2, calm));
  std::vector<double> distances;
  for (size_t i = 0; i < count; ++i) distances.push_back(std::fabs(curve.y[i + reach] - mean.y[i]));
  // A loss is one of those that its mean is of.
  const double others = static_cast<double>(2 * reach) / static_cast<double>(2 * reach + 1);
  return reach == 0
             ? 0.0
             : kDeviationOfMedian / std::sqrt(others) * quantile(std::move(distances), 0.5).value_or(0.0);
}

/// The points before the first that is not finite.
Curve finite_part(const Curve& curve) {
  Curve part;
  for (size_t i = 0; i < curve.size() && std::isfinite(curve.y[i]); ++i) part.add(curve.x[i], curve.y[i]);
  return part;
}

/// The rate where `mean` falls fastest before its lowest point, from what lies `reach` before a step to what
/// lies as far behind it.
double steepest_of(const Curve& mean, size_t lowest, size_t reach) {
  size_t found = 0;
  double fastest = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i <= lowest; ++i) {
    const size_t before = i - std::min(i, reach + 1), behind = std::min(lowest, i + reach + 1);
    if (before == behind) continue;
    const double slope =
        (mean.y[behind] - mean.y[before]) / (std::log(mean.x[behind]) - std::log(mean.x[before]));
    if (slope >= fastest) continue;
    fastest = slope;
    found = i;
  }
  return mean.x[found];
}

/// A mean must differ by so many deviations of the losses from the first one to have fallen or risen: means
/// of a hundred steps without a trend do not do so by chance.
constexpr double kFallOverScatter = 2.0;

std::string short_rate(double rate) {
  return fmt::format("{:.2g}", rate);
}

}  // namespace

LrRange lr_range_of(const Curve& loss) {
  const Curve finite = finite_part(loss);
  const size_t reach = reach_of(finite);
  LrRange range{.loss = loss, .mean = mean_of(finite, reach)};
  if (finite.size() < loss.size()) range.diverged = loss.x[finite.size()];
  if (range.mean.empty()) return range;
  const std::vector<double>& means = range.mean.y;
  auto lowest = static_cast<size_t>(std::ranges::min_element(means) - means.begin());
  const double scatter = scatter_of(finite, range.mean, reach, lowest);
  if (means.front() - means[lowest] > kFallOverScatter * scatter) {
    range.lowest = range.mean.x[lowest];
    range.steepest = steepest_of(range.mean, lowest, reach);
  } else {
    lowest = 0;
  }
  for (size_t i = lowest; i < means.size(); ++i) {
    if (means[i] <= means.front() + kFallOverScatter * scatter) continue;
    range.diverged = range.mean.x[i];
    break;
  }
  return range;
}

Curve loss_over_lr(const RunRecord& run) {
  const Curve &rates = run.metrics.curve("lr"), &losses = run.metrics.curve("loss");
  std::map<double, double> rate_at;
  for (size_t i = 0; i < rates.size(); ++i) rate_at[rates.x[i]] = rates.y[i];
  Curve curve;
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto rate = rate_at.find(losses.x[i]);
    if (rate != rate_at.end() && (curve.empty() || rate->second > curve.x.back()))
      curve.add(rate->second, losses.y[i]);
  }
  return curve;
}

std::string lr_range_page(const LrRange& range, const std::string& run) {
  Chart chart{.title = "loss over learning rate",
              .of = "each step at a higher rate than the one before",
              .scale = Chart::Scale::kAuto,
              .lines = {{"loss", range.loss}, {"mean of neighbours", range.mean}},
              .x_unit = Unit::kNumber,
              .x_log = true,
              .x_name = "learning rate"};
  std::vector<std::pair<std::string, std::string>> facts = {{"run", run}};
  const auto add = [&](const std::optional<double>& at, const std::string& what, const std::string& none) {
    facts.emplace_back(what, at ? short_rate(*at) : none);
    if (at) chart.marks.push_back({*at, what + " at " + short_rate(*at)});
  };
  add(range.steepest, "falls fastest", "nowhere");
  add(range.lowest, "lowest", "nowhere");
  add(range.diverged, "diverged", "nowhere");
  return whole_page("learning rates of " + run,
                    element("h1", "Learning-rate range test") + draw_facts(facts) + draw_chart(chart));
}

}  // namespace trireme::report
