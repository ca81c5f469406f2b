// How well a model in stages does on samples that it has not learnt.
#include <ATen/ATen.h>

#include <utility>

#include "trireme/parallel/wrap.h"
#include "trireme/train/guesses.h"
#include "trireme/train/staged_model.h"

namespace trireme::train {

/// Stages share no buffers, so each follows the first of its data-parallel ranks.
void StagedModel::sync_buffers() {
  for (size_t i = 0; i < stages_.size(); ++i) parallel::sync_buffers(*stages_[i], parts_[i].engine->mesh());
}

/// Messages between stages have one shape, so a batch is filled up with rows of zeros, which count for
/// nothing. Targets are (B, 2), the class and the number of the sample, and -1 for such rows.
Scores StagedModel::evaluate_images(const std::vector<data::Batch>& batches, Guesses* guesses) {
  const int64_t rows = micro_batch_;
  const plan::VisionConfig& model = config_.model.vision;
  std::vector<at::Tensor> inputs, targets;
  for (const data::Batch& batch : batches) {
    at::Tensor images = at::zeros({rows, model.channels, model.image_size, model.image_size}, at::kFloat);
    at::Tensor known = at::full({rows, 2}, -1, at::kLong);
    if (batch.rows > 0) {
      images.narrow(0, 0, batch.rows).copy_(batch.inputs);
      known.narrow(0, 0, batch.rows).copy_(at::stack({batch.targets, at::tensor(batch.samples)}, 1));
    }
    inputs.push_back(on_device(images));
    targets.push_back(on_device(known));
  }
  counting_ = {.scores = {}, .guesses = guesses};
  set_training(false);
  pipeline_->evaluate(inputs, targets, std::vector<double>(batches.size(), 1.0));
  set_training(true);
  return std::exchange(counting_, std::nullopt)->scores;
}

void StagedModel::count(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor samples = targets.select(1, 1).to(at::kCPU).contiguous();
  const int64_t rows = samples.ge(0).sum().item<int64_t>();
  if (rows == 0) return;
  const at::Tensor right = targets.narrow(0, 0, rows).select(1, 0).contiguous(),
                   guessed = logits.narrow(0, 0, rows);
  counting_->scores += score_images(guessed, right);
  if (counting_->guesses == nullptr) return;
  const auto* const first = samples.const_data_ptr<int64_t>();
  counting_->guesses->add(guessed, right, {first, first + rows});
}

/// Of tokens, which nobody wants to see guessed, rank 0 counts for all.
Scores StagedModel::evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) {
  if (reads_images()) return evaluate_images(batches, guesses);
  std::vector<at::Tensor> inputs, targets;
  std::vector<double> weights;
  double all = 0.0;
  for (const data::Batch& batch : batches) {
    inputs.push_back(on_device(batch.inputs));
    targets.push_back(on_device(batch.targets));
    weights.push_back(batch.weight());
    all += batch.step_weight();
  }
  scale_ = 1.0;
  take_documents(batches);
  set_training(false);
  const at::Tensor mean = pipeline_->evaluate(inputs, targets, weights);
  set_training(true);
  if (mesh_.world->rank() != 0 || all == 0.0) return {};
  return {.rows = all, .loss = mean.item<double>() * all};
}

}  // namespace trireme::train
