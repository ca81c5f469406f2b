#include "trireme/train/validate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::train {
namespace {

/// Samples [first, first + count).
data::Batch read_samples(const data::Dataset& dataset, int64_t first, int64_t count) {
  const int64_t width = dataset.seq_len() + 1;
  at::Tensor tokens = at::empty({count, width}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    dataset.read(first + i, {tokens.data_ptr<int64_t>() + i * width, static_cast<size_t>(width)});
  }
  return {.inputs = tokens.narrow(1, 0, dataset.seq_len()),
          .targets = tokens.narrow(1, 1, dataset.seq_len()).contiguous()};
}

/// Samples that a data-parallel rank takes in a round, of a part that begins and ends there.
struct Part {
  int64_t begin, end;
  int64_t rows(int64_t done, int64_t at_once) const {
    return std::clamp<int64_t>(end - begin - done, 0, at_once);
  }
};

}  // namespace

std::optional<double> validation_loss(TrainedModel& model, const data::Dataset& dataset, int64_t samples,
                                      int64_t micro_batch, const comm::Mesh& mesh,
                                      const std::function<bool()>& gives_up) {
  TRIREME_CHECK(samples >= 1 && micro_batch >= 1, "[train.validate] {} samples in micro-batches of {}",
                samples, micro_batch);
  const int64_t ranks = mesh.dp->size(), total = std::min(samples, dataset.size());
  const auto part_of = [&](int64_t rank) { return Part{total * rank / ranks, total * (rank + 1) / ranks}; };
  const Part mine = part_of(mesh.dp_rank);
  const int64_t largest_part = (total + ranks - 1) / ranks;
  const int64_t round = micro_batch * model.batches_at_once();
  double sum = 0.0;
  for (int64_t done = 0; done < largest_part; done += round) {
    if (gives_up()) return std::nullopt;
    std::vector<data::Batch> batches;
    std::vector<int64_t> rows;
    for (int64_t at = done; at < done + round; at += micro_batch) {
      rows.push_back(mine.rows(at, micro_batch));
      const int64_t first = rows.back() > 0 ? mine.begin + at : 0;
      batches.push_back(read_samples(dataset, first, std::max<int64_t>(1, rows.back())));
    }
    int64_t all_rows = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) all_rows += part_of(rank).rows(done, round);
    sum += model.evaluate(batches, rows, all_rows);
  }
  double all = 0.0;
  for (const std::vector<double>& part : comm::gather_scalars(*mesh.all, {sum})) all += part[0];
  return all / static_cast<double>(total);
}

}  // namespace trireme::train
