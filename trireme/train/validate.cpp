#include "trireme/train/validate.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"

namespace trireme::train {
namespace {

Scores sum_over_ranks(const Scores& mine, const comm::Mesh& mesh) {
  Scores all;
  for (const std::vector<double>& rank :
       comm::gather_scalars(*mesh.all, {mine.rows, mine.loss, mine.top1, mine.top5}))
    all += {.rows = rank[0], .loss = rank[1], .top1 = rank[2], .top5 = rank[3]};
  return all;
}

}  // namespace

std::optional<Validation> validate(TrainedModel& model, const RunData& data, int64_t samples,
                                   const FeedOptions& batches, const comm::Mesh& mesh,
                                   const std::function<bool()>& gives_up, Guesses* guesses) {
  TRIREME_CHECK(samples >= 1, "[train.validate] {} samples; at least 1 is needed", samples);
  const ValidationFeed feed = data.validation(samples, batches);
  const int64_t at_once = model.batches_at_once();
  model.sync_buffers();
  Scores mine;
  for (int64_t done = 0; done < feed.batches; done += at_once) {
    beat();
    if (gives_up()) return std::nullopt;
    std::vector<data::Batch> round;
    for (int64_t i = 0; i < at_once; ++i) round.push_back(feed.next());
    mine += model.evaluate(round, guesses);
  }
  const Scores all = sum_over_ranks(mine, mesh);
  Validation found{.loss = all.loss / all.rows, .top1 = {}, .top5 = {}};
  if (!data.has_labels()) return found;
  found.top1 = all.top1 / all.rows;
  found.top5 = all.top5 / all.rows;
  return found;
}

}  // namespace trireme::train
