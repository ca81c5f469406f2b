#include "trireme/train/validate.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::train {
namespace {

/// Samples [first, first + count) as (count, T + 1) tokens.
at::Tensor read_samples(const data::Dataset& dataset, int64_t first, int64_t count) {
  const int64_t width = dataset.seq_len() + 1;
  at::Tensor tokens = at::empty({count, width}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    dataset.read(first + i, {tokens.data_ptr<int64_t>() + i * width, static_cast<size_t>(width)});
  }
  return tokens;
}

/// The model without dropout, for a while.
class Evaluating {
 public:
  explicit Evaluating(nn::LanguageModel& model) : model_(model) { model_.eval(); }
  ~Evaluating() { model_.train(); }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  nn::LanguageModel& model_;
};

}  // namespace

std::optional<double> validation_loss(nn::LanguageModel& model, const data::Dataset& dataset, int64_t samples,
                                      int64_t micro_batch, const comm::Mesh& mesh,
                                      const std::function<bool()>& gives_up) {
  TRIREME_CHECK(samples >= 1 && micro_batch >= 1, "[train.validate] {} samples in micro-batches of {}",
                samples, micro_batch);
  const at::NoGradGuard no_grad;
  const Evaluating evaluating(model);
  const int64_t ranks = mesh.dp->size();
  const int64_t total = std::min(samples, dataset.size());
  const int64_t begin = total * mesh.dp_rank / ranks;
  const int64_t end = total * (mesh.dp_rank + 1) / ranks;
  const int64_t largest_part = (total + ranks - 1) / ranks;
  double sum = 0.0;
  for (int64_t done = 0; done < largest_part; done += micro_batch) {
    if (gives_up()) return std::nullopt;
    const int64_t first = std::min(begin + done, end);
    const int64_t count = std::min(micro_batch, end - first);
    const at::Tensor tokens =
        read_samples(dataset, count > 0 ? first : 0, std::max<int64_t>(1, count)).to(mesh.world->device());
    const int64_t length = dataset.seq_len();
    const at::Tensor loss = model.loss(tokens.narrow(1, 0, length), tokens.narrow(1, 1, length).contiguous());
    sum += loss.item<double>() * static_cast<double>(count);
  }
  double all = 0.0;
  for (const std::vector<double>& part : comm::gather_scalars(*mesh.dp, {sum})) all += part[0];
  return all / static_cast<double>(total);
}

}  // namespace trireme::train
