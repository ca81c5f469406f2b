#include "trireme/train/staged_passes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"
#include "trireme/train/batch_documents.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/guesses.h"

namespace trireme::train {

StagedPasses::StagedPasses(const ModelSetup& setup, const plan::PipelinePlan& plan,
                           const nn::Fp8History* history, std::vector<TrainedStage>& stages)
    : config_(setup.config), mesh_(setup.mesh), micro_batch_(setup.batch.micro_batch), plan_(plan) {
  const nn::InitialWeights initial(setup.held.units, static_cast<uint64_t>(config_.seed));
  const comm::Mesh engine_mesh = parallel::stage_mesh(plan_.schedule, mesh_);
  std::vector<parallel::Stage> of_pipeline;
  for (const int64_t index : plan_.schedule.stages_of(mesh_.pp_rank)) {
    const parallel::Stage& made =
        of_pipeline.emplace_back(make_stage(setup, index, engine_mesh, initial, history));
    stages.push_back({.index = index, .module = made.module, .engine = made.engine});
  }
  parallel::PipelineOptions options;
  options.data_parallel.average = parallel::Average::kSum;  // as engine_options() has it
  options.ahead = config_.pipeline.ahead;
  options.tied = ModelStage::ties(config_.model, plan_);
  if (!config_.train.step_program.empty()) options.program = given_program(setup);
  pipeline_ = std::make_unique<parallel::Pipeline>(plan_.schedule, std::move(of_pipeline), loss_function(),
                                                   mesh_, options);
}

parallel::Stage StagedPasses::make_stage(const ModelSetup& setup, int64_t stage,
                                         const comm::Mesh& engine_mesh, const nn::InitialWeights& initial,
                                         const nn::Fp8History* history) {
  const plan::UnitRange range = plan::units_of_stage(plan_.split, stage);
  const auto module =
      std::make_shared<ModelStage>(config_.model, range, make_model(setup, engine_mesh), setup.held.split);
  if (module->is_last()) last_ = module;
  parallel::Stage made;
  if (range.vocabulary) {
    head_part_ = module;
    made = {.index = stage, .module = module, .forward = {}, .part = head_part_function()};
  } else {
    made = parallel::make_stage(stage, module);
  }
  made.engine = module->make_engine(engine_mesh, engine_options(config_, mesh_, history), initial,
                                    config_.memory, config_.precision.fp8, history);
  made.begins = [this, module](int64_t micro_batch) {
    const auto index = static_cast<size_t>(micro_batch);
    module->set_documents(index < documents_.size() ? documents_[index] : nn::Documents());
  };
  return made;
}

/// The kernel of the loss makes its gradient in the forward pass, so it wants to know the scale.
parallel::StageLoss StagedPasses::loss_function() {
  if (!last_) return {};
  return [this, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& x, const at::Tensor& targets) {
    if (counting_) {
      count(last_->logits(x), targets);
      return at::zeros({}, targets.options().dtype(at::kFloat));
    }
    return last_->loss(x, {.targets = targets, .chunk_bytes = chunk, .gradient_scale = scale_});
  };
}

std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> StagedPasses::head_part_function()
    const {
  return [this, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& hidden,
                                                             const at::Tensor& targets) {
    return head_part_->part(hidden, {.targets = targets, .chunk_bytes = chunk});
  };
}

at::Tensor StagedPasses::on_device(const at::Tensor& tensor) const {
  return tensor.to(mesh_.world->device(), /*non_blocking=*/true);
}

void StagedPasses::take_documents(const std::vector<data::Batch>& batches) {
  documents_.clear();
  for (const data::Batch& batch : batches)
    documents_.push_back(documents_on(mesh_.world->device(), batch.documents));
}

at::Tensor StagedPasses::run(const std::function<data::Batch()>& next, double scale) {
  const auto count = static_cast<size_t>(plan_.schedule.micro_batches);
  const bool has_first = plan_.schedule.stages_of(mesh_.pp_rank).front() == 0;
  std::vector<at::Tensor> inputs(count), targets(count);
  std::vector<data::Batch> batches;
  std::vector<double> shares;  // of micro-batches in the step
  for (size_t i = 0; i < count; ++i) {
    const data::Batch& batch = batches.emplace_back(next());
    shares.push_back(batch.share());
    if (has_first) inputs[i] = on_device(batch.inputs);
    if (last_ || head_part_) targets[i] = on_device(batch.targets);
  }
  take_documents(batches);
  const double share = std::accumulate(shares.begin(), shares.end(), 0.0);
  const double largest = *std::max_element(shares.begin(), shares.end());
  scale_ = scale * (largest > 0.0 ? largest : 1.0);
  std::vector<double> weights = shares;
  for (double& weight : weights) weight *= scale;
  return pipeline_->forward_backward(inputs, targets, weights) * share;
}

/// For tokens, which nobody wants to see guessed, rank 0 reports the scores of all ranks.
Scores StagedPasses::evaluate(const std::vector<data::Batch>& batches, const std::vector<Metric>&,
                              Guesses* guesses) {
  if (plan::reads_images(config_.model.family)) return evaluate_images(batches, guesses);
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
  const at::Tensor mean = pipeline_->evaluate(inputs, targets, weights);
  if (mesh_.world->rank() != 0 || all == 0.0) return {};
  return {.rows = all, .loss = mean.item<double>() * all};
}

/// Messages between stages have one shape, so a batch is filled up with rows of zeros, which count for
/// nothing. Targets are (B, 2), the class and the number of the sample, and -1 for such rows.
Scores StagedPasses::evaluate_images(const std::vector<data::Batch>& batches, Guesses* guesses) {
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
  pipeline_->evaluate(inputs, targets, std::vector<double>(batches.size(), 1.0));
  return std::exchange(counting_, std::nullopt)->scores;
}

void StagedPasses::count(const at::Tensor& logits, const at::Tensor& targets) {
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

/// The rank that has the last stage tells the others; of a head that is spread each has some.
at::Tensor StagedPasses::infer(const at::Tensor& inputs,
                               const std::function<at::Tensor(const at::Tensor& logits)>& last) {
  const ModelStage* const head = head_part_ ? head_part_.get() : last_.get();
  documents_.clear();
  const at::Tensor made =
      pipeline_->infer(inputs, [&](const at::Tensor& x) { return last(head->logits(x)).contiguous(); });
  if (head_part_) return joined_logits(made);
  at::Tensor logits =
      made.defined() ? made : at::empty({config_.model.vocab_size}, inputs.options().dtype(at::kFloat));
  // A single micro-batch takes the second of two directions.
  const plan::Schedule one = plan::forward_only(plan_.schedule, 1);
  mesh_.pp->broadcast(logits, one.rank_of(one.stages - 1, 0));
  return logits;
}

/// Ranks have different numbers of rows, and gather as many as the one that has most.
at::Tensor StagedPasses::joined_logits(const at::Tensor& mine) const {
  const std::vector<int64_t>& first = plan_.split.vocabulary;
  int64_t most = 0;
  for (size_t rank = 0; rank + 1 < first.size(); ++rank) most = std::max(most, first[rank + 1] - first[rank]);
  at::Tensor padded = at::zeros({most}, mine.options());
  padded.narrow(0, 0, mine.size(0)).copy_(mine);
  const at::Tensor all = comm::gather_rows(*mesh_.pp, padded);
  std::vector<at::Tensor> rows;
  for (size_t rank = 0; rank + 1 < first.size(); ++rank)
    rows.push_back(all[static_cast<int64_t>(rank)].narrow(0, 0, first[rank + 1] - first[rank]));
  return at::cat(rows);
}

/// On a CPU what is enqueued has not left.
int64_t StagedPasses::sent_bytes() {
  if (mesh_.world->device().is_cpu()) pipeline_->flush();
  return pipeline_->sent_bytes();
}

}  // namespace trireme::train
