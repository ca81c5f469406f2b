#include "trireme/report/lr_range.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "trireme/report/chart.h"
#include "trireme/report/page_parts.h"

namespace trireme::report {
namespace {

/// The means of neighbours, of as many on both sides, so that the ends are not pulled to the middle.
Curve mean_of(const Curve& curve) {
  constexpr size_t kShare = 20;
  const size_t count = curve.size(), reach = count / kShare;
  Curve mean;
  for (size_t at = 0; at < count; ++at) {
    const size_t near = std::min({reach, at, count - 1 - at});
    double sum = 0.0;
    for (size_t i = at - near; i <= at + near; ++i) sum += curve.y[i];
    mean.add(curve.x[at], sum / static_cast<double>(2 * near + 1));
  }
  return mean;
}

/// The points before the first that is not finite.
Curve finite_part(const Curve& curve) {
  Curve part;
  for (size_t i = 0; i < curve.size() && std::isfinite(curve.y[i]); ++i) part.add(curve.x[i], curve.y[i]);
  return part;
}

/// Where `mean` falls fastest before its lowest point; none: nowhere.
std::optional<double> steepest_of(const Curve& mean, size_t lowest) {
  std::optional<double> found;
  double fastest = 0.0;
  for (size_t i = 1; i < lowest; ++i) {
    const double slope =
        (mean.y[i + 1] - mean.y[i - 1]) / (std::log(mean.x[i + 1]) - std::log(mean.x[i - 1]));
    if (slope >= fastest) continue;
    fastest = slope;
    found = mean.x[i];
  }
  return found;
}

std::string short_rate(double rate) {
  return fmt::format("{:.2g}", rate);
}

}  // namespace

LrRange lr_range_of(const Curve& loss) {
  const Curve finite = finite_part(loss);
  LrRange range{.loss = loss, .mean = mean_of(finite)};
  if (finite.empty()) {
    if (!loss.empty()) range.diverged = loss.x.front();
    return range;
  }
  const std::vector<double>& means = range.mean.y;
  const auto lowest = static_cast<size_t>(std::ranges::min_element(means) - means.begin());
  range.steepest = steepest_of(range.mean, lowest);
  if (range.steepest) range.lowest = range.mean.x[lowest];
  for (size_t i = lowest; i < means.size() && !range.diverged; ++i)
    if (means[i] > means.front()) range.diverged = range.mean.x[i];
  if (!range.diverged && finite.size() < loss.size()) range.diverged = loss.x[finite.size()];
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
