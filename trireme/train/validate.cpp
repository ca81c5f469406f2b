#include "trireme/train/validate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"

namespace trireme::train {
namespace {

/// `own`: how many sums the metrics of the program have.
Scores sum_over_ranks(const Scores& mine, size_t own, const comm::Mesh& mesh) {
  std::vector<double> told = {mine.rows, mine.loss, mine.top1, mine.top5};
  const auto common = std::ssize(told);
  told.insert(told.end(), mine.own.begin(), mine.own.end());
  told.resize(static_cast<size_t>(common) + own);  // of a rank without rows
  Scores all;
  for (const std::vector<double>& rank : comm::gather_scalars(*mesh.all, told))
    all += {.rows = rank[0],
            .loss = rank[1],
            .top1 = rank[2],
            .top5 = rank[3],
            .own = {rank.begin() + common, rank.end()}};
  return all;
}

/// The metrics, each of its part of the sums.
std::map<std::string, double> values_of(const std::vector<Metric>& metrics, const std::vector<double>& sums) {
  std::map<std::string, double> values;
  auto begin = sums.begin();
  for (const Metric& metric : metrics) {
    values[metric.name] = value_of(metric, {begin, begin + metric.sums});
    begin += metric.sums;
  }
  return values;
}

size_t count_sums(const std::vector<Metric>& metrics) {
  int64_t count = 0;
  for (const Metric& metric : metrics) count += metric.sums;
  return static_cast<size_t>(count);
}

/// One set of held-out samples.
std::optional<Validation> validate_set(TrainedModel& model, const RunData& data, const ValidationFeed& feed,
                                       const comm::Mesh& mesh, const std::function<bool()>& gives_up,
                                       Guesses* guesses) {
  const int64_t at_once = model.passes().batches_at_once();
  model.sync_buffers();
  Scores mine;
  for (int64_t done = 0; done < feed.batches; done += at_once) {
    beat();
    if (gives_up()) return std::nullopt;
    std::vector<data::Batch> round;
    for (int64_t i = 0; i < at_once; ++i) round.push_back(feed.next());
    mine += model.evaluate(round, guesses);
  }
  const Scores all = sum_over_ranks(mine, count_sums(model.metrics()), mesh);
  Validation found{.loss = all.loss / all.rows,
                   .top1 = {},
                   .top5 = {},
                   .metrics = values_of(model.metrics(), all.own),
                   .rows = all.rows};
  if (!data.has_labels()) return found;
  found.top1 = all.top1 / all.rows;
  found.top5 = all.top5 / all.rows;
  return found;
}

/// A mean by weights of what there is.
struct WeightedMean {
  double sum = 0.0, weights = 0.0;
  void add(double value, double weight) {
    sum += weight * value;
    weights += weight;
  }
  double value() const { return sum / weights; }
};

/// Results of several sets. One without a target that counts, or in which a metric measures nothing, has no
/// part in them.
class SetResults {
 public:
  void add(const Validation& found, const RunData::HeldOutSet& set) {
    if (found.rows > 0.0) {
      loss_.add(found.loss, set.weight);
      by_name_["loss/" + set.name] = found.loss;
    }
    for (const auto& [metric, value] : found.metrics) {
      if (std::isnan(value)) continue;
      metrics_[metric].add(value, set.weight);
      by_name_[metric + "/" + set.name] = value;
    }
  }
  Validation of_all() const {
    Validation all{.loss = loss_.value(), .top1 = {}, .top5 = {}, .metrics = by_name_};
    for (const auto& [metric, mean] : metrics_) all.metrics[metric] = mean.value();
    return all;
  }

 private:
  WeightedMean loss_;
  std::map<std::string, WeightedMean> metrics_;
  std::map<std::string, double> by_name_;
};

}  // namespace

std::optional<Validation> validate(TrainedModel& model, const RunData& data, int64_t samples,
                                   const FeedOptions& batches, const comm::Mesh& mesh,
                                   const std::function<bool()>& gives_up, Guesses* guesses) {
  TRIREME_CHECK(samples >= 1, "[train.validate] {} samples; at least 1 is needed", samples);
  const std::vector<RunData::HeldOutSet> sets = data.held_out_sets();
  if (sets.empty())
    return validate_set(model, data, data.validation(samples, batches), mesh, gives_up, guesses);
  double weights = 0.0;
  for (const RunData::HeldOutSet& set : sets) weights += set.weight;
  SetResults all;
  for (size_t i = 0; i < sets.size(); ++i) {
    const double share = sets[i].weight / weights;
    const auto its = std::max<int64_t>(1, std::llround(share * static_cast<double>(samples)));
    const auto found =
        validate_set(model, data, data.validation_of(i, its, batches), mesh, gives_up, guesses);
    if (!found) return std::nullopt;
    all.add(*found, sets[i]);
  }
  return all.of_all();
}

}  // namespace trireme::train
