#include "trireme/train/monitor.h"

#include <limits>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::train {

double Monitor::of(const Validation& found) const {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (metric == "loss") return found.loss;
  if (metric == "top1") return found.top1.value_or(kNone);
  if (metric == "top5") return found.top5.value_or(kNone);
  const auto own = found.metrics.find(metric);
  return own == found.metrics.end() ? kNone : own->second;
}

Monitor monitor_of(const plan::Config& config, const RunData& data, const std::vector<Metric>& metrics,
                   const std::string& otherwise) {
  std::vector<Monitor> known = {{}};
  if (data.has_labels()) known.insert(known.end(), {{"top1", true}, {"top5", true}});
  for (const Metric& metric : metrics) known.push_back({metric.name, metric.higher_is_better});
  for (const RunData::HeldOutSet& set : data.held_out_sets()) {
    known.push_back({"loss/" + set.name, false});
    for (const Metric& metric : metrics)
      known.push_back({metric.name + "/" + set.name, metric.higher_is_better});
  }
  const std::string& wanted = config.train.monitor.empty() ? otherwise : config.train.monitor;
  std::vector<std::string> names;
  for (const Monitor& monitor : known) {
    if (monitor.metric == wanted) return monitor;
    names.push_back(monitor.metric);
  }
  throw ConfigError(
      "[train.monitor] train.monitor={} is none of what this run validates: {}; name one of them", wanted,
      join(names, ", "));
}

}  // namespace trireme::train
