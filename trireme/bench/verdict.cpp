#include "trireme/bench/verdict.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace trireme::bench {
namespace {

/// The runs of an arm in order.
std::vector<const Sample*> runs_of(const std::vector<Sample>& samples, size_t arm) {
  std::vector<const Sample*> runs;
  for (const Sample& sample : samples) {
    if (sample.slot.arm == static_cast<int64_t>(arm)) runs.push_back(&sample);
  }
  return runs;
}

Verdict verdict_of(const report::Interval& interval) {
  if (interval.low > 1.0) return Verdict::kFaster;
  return interval.high < 1.0 ? Verdict::kSlower : Verdict::kNoDifference;
}

/// The run of the reference in the same half of the same block; none: it has not run.
const Sample* beside(const std::vector<const Sample*>& references, const Slot& slot) {
  const auto found = std::ranges::find_if(references, [&](const Sample* one) {
    return one->slot.block == slot.block && one->slot.half == slot.half;
  });
  return found == references.end() ? nullptr : *found;
}

}  // namespace

std::string verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kReference:
      return "reference";
    case Verdict::kFaster:
      return "faster";
    case Verdict::kSlower:
      return "slower";
    case Verdict::kNoDifference:
      return "no difference";
    case Verdict::kBlocked:
      return "blocked";
  }
  return "";
}

std::string verdict_text(const Score& score) {
  const bool says_much = score.verdict == Verdict::kFaster || score.verdict == Verdict::kSlower;
  return (says_much && coverage(score.ratios.size()) < 0.95 ? "perhaps " : "") + verdict_text(score.verdict);
}

double value_of(const Sample& sample, Statistic statistic, int64_t warm_up) {
  const std::vector<double> steps = steady(sample, warm_up);
  if (statistic == Statistic::kMedian) return report::median(steps).value_or(0.0);
  return steps.empty() ? 0.0
                       : std::accumulate(steps.begin(), steps.end(), 0.0) / static_cast<double>(steps.size());
}

std::vector<Score> score(const std::vector<Arm>& arms, const std::vector<Sample>& samples,
                         Statistic statistic, int64_t warm_up, bool holds) {
  std::vector<Score> scores(arms.size());
  const std::vector<const Sample*> references = runs_of(samples, 0);
  for (size_t arm = 0; arm < arms.size(); ++arm) {
    Score& one = scores[arm];
    for (const Sample* run : runs_of(samples, arm)) {
      const double value = value_of(*run, statistic, warm_up);
      if (value <= 0.0) continue;
      one.values.push_back(value);
      const Sample* other = beside(references, run->slot);
      if (arm > 0 && holds && other != nullptr)
        one.ratios.push_back(value_of(*other, statistic, warm_up) / value);
    }
    one.median_ms = report::median(one.values).value_or(0.0);
    if (!holds) one.verdict = Verdict::kBlocked;
    if (one.ratios.empty()) continue;
    one.ratio = *report::median(one.ratios);
    one.interval = {.low = std::ranges::min(one.ratios), .high = std::ranges::max(one.ratios)};
    one.verdict = verdict_of(one.interval);
  }
  return scores;
}

double coverage(size_t ratios) {
  return ratios == 0 ? 0.0 : 1.0 - std::exp2(1.0 - static_cast<double>(ratios));
}

}  // namespace trireme::bench
