#include "trireme/train/staged_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "trireme/nn/init.h"
#include "trireme/parallel/tensor_joint.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/vision_model.h"
#include "trireme/train/batch_documents.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/image_model.h"

namespace trireme::train {
namespace {

at::TensorOptions numbers_on(c10::Device device) {
  return at::TensorOptions().device(device).dtype(at::kDouble);
}

}  // namespace

StagedModel::StagedModel(const ModelSetup& setup)
    : TrainedModel(setup),
      config_(setup.config),
      facts_(setup.facts),
      mesh_(setup.mesh),
      micro_batch_(setup.batch.micro_batch),
      split_(setup.held.split),
      plan_(plan::plan_pipeline(setup.config, setup.batch)) {
  const plan::Schedule& schedule = plan_.schedule;
  const nn::InitialWeights initial(setup.held.units, static_cast<uint64_t>(config_.seed));
  const comm::Mesh engine_mesh = parallel::stage_mesh(schedule, mesh_);
  std::vector<parallel::Stage> stages;
  for (const int64_t stage : schedule.stages_of(mesh_.pp_rank))
    stages.push_back(add_stage(stage, engine_mesh, initial));
  name_units(setup.facts);
  parallel::PipelineOptions options;
  options.data_parallel.average = parallel::Average::kSum;  // as engine_options() has it
  options.ahead = config_.pipeline.ahead;
  options.tied = ModelStage::ties(config_.model, plan_);
  if (!config_.train.step_program.empty()) options.program = given_program(setup);
  pipeline_ =
      std::make_unique<parallel::Pipeline>(schedule, std::move(stages), loss_function(), mesh_, options);
}

parallel::Stage StagedModel::add_stage(int64_t stage, const comm::Mesh& engine_mesh,
                                       const nn::InitialWeights& initial) {
  const plan::UnitRange range = plan::units_of_stage(plan_.split, stage);
  const auto module = std::make_shared<ModelStage>(config_.model, range, image_model_of(engine_mesh), split_);
  const auto engine = module->make_engine(engine_mesh, engine_options(config_, mesh_, fp8_history()), initial,
                                          config_.memory, config_.precision.fp8, fp8_history());
  module->set_joint(joint_of(config_.model, mesh_));
  module->set_context(context_of(config_, mesh_));
  stages_.push_back(module);
  stage_of_engine_.push_back(stage);
  parts_.push_back({.engine = engine, .optimizer = optim::build(config_.optim, engine->optimizer_params())});
  if (module->is_last()) last_ = module;
  parallel::Stage made;
  if (range.vocabulary) {
    head_part_ = module;
    made = {.index = stage, .module = module, .forward = {}, .part = head_part_function()};
  } else {
    made = parallel::make_stage(stage, module);
  }
  made.engine = engine;
  made.begins = [this, module](int64_t micro_batch) {
    const auto index = static_cast<size_t>(micro_batch);
    module->set_documents(index < documents_.size() ? documents_[index] : nn::Documents());
  };
  return made;
}

/// Null of text, of which each stage makes its own.
std::shared_ptr<nn::Model> StagedModel::image_model_of(const comm::Mesh& mesh) const {
  if (!reads_images()) return nullptr;
  return make_image_model(config_.model.vision, mesh);
}

bool StagedModel::reads_images() const {
  return plan::reads_images(config_.model.family);
}

/// Engines refer to the stages.
StagedModel::~StagedModel() {
  pipeline_.reset();
  parts_.clear();
}

/// Units of the whole model by stage, and which stage saves which part of each tensor.
void StagedModel::name_units(const plan::ModelFacts& facts) {
  for (int64_t stage = 0; stage < plan_.schedule.all_stages(); ++stage) {
    first_unit_.push_back(units_.size());
    const auto range = plan::units_of_stage(plan_.split, stage);
    const std::vector<plan::UnitSpec> units = plan::stage_units(config_.model, facts, range);
    if (reads_images()) {
      for (const plan::BufferSpec& buffer : plan::buffers_of(config_.model.vision, units))
        saved_buffers_[buffer.name] = {stage, buffer.shape, {}};
    }
    for (const plan::UnitSpec& unit : units) {
      const bool repeats = unit.name == plan::kRootUnit || plan_.schedule.is_head_part(stage);
      units_.push_back(repeats ? fmt::format("{} of stage {}", unit.name, stage) : unit.name);
      for (const plan::ParamSpec& param : unit.params) {
        if (param.part.copy == 0)
          saved_params_[param.name].push_back({stage, param.shape, param.part, param.frozen});
      }
    }
  }
}

/// The kernel of the loss makes its gradient in the forward pass, so it wants to know the scale.
parallel::StageLoss StagedModel::loss_function() {
  if (!last_) return {};
  return [this, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& x, const at::Tensor& targets) {
    if (counting_) {
      count(last_->logits(x), targets);
      return at::zeros({}, targets.options().dtype(at::kFloat));
    }
    return last_->loss(x, {.targets = targets, .chunk_bytes = chunk, .gradient_scale = scale_});
  };
}

std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> StagedModel::head_part_function()
    const {
  return [this, chunk = config_.memory.loss_chunk_mib << 20](const at::Tensor& hidden,
                                                             const at::Tensor& targets) {
    return head_part_->part(hidden, {.targets = targets, .chunk_bytes = chunk});
  };
}

at::Tensor StagedModel::on_device(const at::Tensor& tensor) const {
  return tensor.to(mesh_.world->device(), /*non_blocking=*/true);
}

void StagedModel::take_documents(const std::vector<data::Batch>& batches) {
  documents_.clear();
  for (const data::Batch& batch : batches)
    documents_.push_back(documents_on(mesh_.world->device(), batch.documents));
}

/// The first rank of each pipeline counts its losses, and the first of those along tp.
at::Tensor StagedModel::run_passes(const std::function<data::Batch()>& next, double scale) {
  const auto count = static_cast<size_t>(plan_.schedule.micro_batches);
  const bool has_first = stage_of_engine_.front() == 0;
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
  const at::Tensor mean = pipeline_->forward_backward(inputs, targets, weights);
  return mesh_.pp_rank == 0 && mesh_.tp_rank == 0 ? mean * share : at::zeros_like(mean);
}

/// The copies of a stage that two ranks have are parts of one gradient.
at::Tensor StagedModel::grad_squares() const {
  at::Tensor squares = at::zeros({plan_.schedule.all_stages()}, numbers_on(mesh_.world->device()));
  for (size_t i = 0; i < parts_.size(); ++i) {
    squares[stage_of_engine_[i]].copy_(parts_[i].engine->grad_squares());
  }
  return squares;
}

at::Tensor StagedModel::sum_over_ranks(const at::Tensor& squares) const {
  const parallel::DataParallel& engine = *parts_.front().engine;
  const int64_t ranks = mesh_.stage->size();
  at::Tensor sum = at::zeros({}, squares.options());
  for (int64_t stage = 0; stage < plan_.schedule.all_stages(); ++stage) {
    std::vector<at::Tensor> by_rank;
    for (const int64_t pp_rank : holders_of(stage))
      by_rank.push_back(squares.select(1, stage).narrow(0, pp_rank * ranks, ranks));
    sum += sum_over_stage(engine, at::cat(by_rank), mesh_.shape);
  }
  return sum;
}

double StagedModel::sum_over_ranks(const std::vector<std::vector<double>>& squares) const {
  const parallel::DataParallel& engine = *parts_.front().engine;
  const int64_t ranks = mesh_.stage->size();
  double sum = 0.0;
  for (int64_t stage = 0; stage < plan_.schedule.all_stages(); ++stage) {
    std::vector<double> by_rank;
    for (const int64_t pp_rank : holders_of(stage)) {
      for (int64_t rank = pp_rank * ranks; rank < (pp_rank + 1) * ranks; ++rank)
        by_rank.push_back(squares[static_cast<size_t>(rank)][static_cast<size_t>(stage)]);
    }
    sum += sum_over_stage(engine, by_rank, mesh_.shape);
  }
  return sum;
}

/// Ranks of a pipeline that have the stage, in the order of its data-parallel ranks.
std::set<int64_t> StagedModel::holders_of(int64_t stage) const {
  const plan::Schedule& schedule = plan_.schedule;
  return {schedule.rank_of(stage, 0), schedule.rank_of(stage, schedule.micro_batches - 1)};
}

at::Tensor StagedModel::unit_grad_squares() const {
  const auto options = numbers_on(mesh_.world->device());
  at::Tensor squares = at::zeros({std::ssize(units_)}, options);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const at::Tensor mine = parts_[i].engine->unit_grad_squares();
    const auto first = static_cast<int64_t>(first_unit_[static_cast<size_t>(stage_of_engine_[i])]);
    squares.narrow(0, first, mine.numel()).copy_(mine);
  }
  return squares;
}

/// On a CPU what is enqueued has not left. Engines of one rank share their groups.
int64_t StagedModel::sent_bytes() const {
  if (mesh_.world->device().is_cpu()) pipeline_->flush();
  return parts_.front().engine->sent_bytes() + pipeline_->sent_bytes();
}

void StagedModel::set_training(bool on) {
  for (const auto& stage : stages_) stage->train(on);
}

/// The rank that has the last stage tells the others; of a head that is spread each has some.
at::Tensor StagedModel::next_logits(const at::Tensor& tokens) {
  const c10::Device device = mesh_.world->device();
  const ModelStage* const head = head_part_ ? head_part_.get() : last_.get();
  const plan::TokenSplit split = plan::token_split(config_, mesh_.cp_rank);
  const at::Tensor inputs = nn::tokens_of(padded(tokens, plan::length_multiple(config_)), split).to(device);
  documents_.clear();
  const at::Tensor made = pipeline_->infer(inputs, [&, last = tokens.size(1) - 1](const at::Tensor& x) {
    return logits_of_all(head->logits(x), split, mesh_)
        .select(1, last)
        .squeeze(0)
        .to(at::kFloat)
        .contiguous();
  });
  if (head_part_) return joined_logits(made).to(at::kCPU);
  at::Tensor logits = made.defined() ? made
                                     : at::empty({config_.model.vocab_size},
                                                 at::TensorOptions().device(device).dtype(at::kFloat));
  // Of a single micro-batch, which takes the second of two directions.
  const plan::Schedule one = plan::forward_only(plan_.schedule, 1);
  mesh_.pp->broadcast(logits, one.rank_of(one.stages - 1, 0));
  return logits.to(at::kCPU);
}

/// Ranks have different numbers of rows, and gather as many as the one that has most.
at::Tensor StagedModel::joined_logits(const at::Tensor& mine) const {
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

std::vector<int32_t> StagedModel::generate(std::vector<int32_t> prompt, const SamplingOptions& options) {
  set_training(false);
  std::vector<int32_t> tokens = train::generate([this](const at::Tensor& seen) { return next_logits(seen); },
                                                std::move(prompt), options);
  set_training(true);
  return tokens;
}

}  // namespace trireme::train
