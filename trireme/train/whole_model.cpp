#include "trireme/train/whole_model.h"

#include <ATen/ATen.h>

#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/parallel/state_file.h"
#include "trireme/parallel/tensor_joint.h"
#include "trireme/parallel/wrap.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/train/batch_documents.h"
#include "trireme/train/connect.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/guesses.h"
#include "trireme/train/image_model.h"

namespace trireme::train {
namespace {

Passes::Options pass_options(const ModelSetup& setup) {
  const bool always = setup.config.train.cuda_graphs == plan::CudaGraphs::kOn;
  return {.accumulation = setup.batch.accumulation,
          .rows = setup.batch.micro_batch,
          .step_rows = setup.batch.global_batch,
          .loss_chunk_bytes = setup.config.memory.loss_chunk_mib << 20,
          .make_recording = setup.records_passes && setup.config.train.step_program.empty()
                                ? parallel::recordings()
                                : parallel::RecordingMaker(),
          .when = always ? Passes::When::kAlways : Passes::When::kDeviceIdles};
}

/// The model without dropout, for a while.
class Evaluating {
 public:
  explicit Evaluating(nn::Model& model) : model_(model) { model_.eval(); }
  ~Evaluating() { model_.train(); }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  nn::Model& model_;
};

std::shared_ptr<nn::Model> make_model(const ModelSetup& setup) {
  const plan::ModelConfig& model = setup.config.model;
  if (plan::reads_images(model.family)) return make_image_model(model.vision, setup.mesh);
  const std::shared_ptr<nn::Model> text = nn::build(plan::split_model(model, setup.held.split));
  text->set_joint(joint_of(model, setup.mesh));
  text->set_context(context_of(setup.config, setup.mesh));
  return text;
}

}  // namespace

WholeModel::WholeModel(const ModelSetup& setup)
    : TrainedModel(setup),
      model_(make_model(setup)),
      mesh_(setup.mesh),
      config_(setup.config),
      facts_(setup.facts),
      device_(setup.mesh.world->device()),
      reads_images_(plan::reads_images(setup.config.model.family)) {
  const plan::Config& config = setup.config;
  const bool buckets = config.parallel.bucket_mib > 0.0;
  auto engine = std::make_shared<parallel::DataParallel>(
      *model_, plan::engine_units(config, setup.held), setup.mesh,
      engine_options(config, setup.mesh, fp8_history()),
      nn::InitialWeights(setup.held.units, static_cast<uint64_t>(config.seed)),
      buckets ? parallel::UseFrom::kBuckets : parallel::UseFrom::kRunUnit);
  connect(*model_, *engine, config.memory, config.precision.fp8, fp8_history());
  for (const parallel::FlatUnit* unit : engine->units()) units_.push_back(unit->name());
  if (!config.train.step_program.empty()) engine->run_program(given_program(setup), setup.batch.accumulation);
  passes_ = std::make_unique<Passes>(*model_, *engine, device_, pass_options(setup));
  auto optimizer = optim::build(config.optim, engine->optimizer_params());
  parts_.push_back({.engine = std::move(engine), .optimizer = std::move(optimizer)});
}

/// Engines refer to the model.
WholeModel::~WholeModel() {
  passes_.reset();
  parts_.clear();
}

/// Ranks along tp have the loss of the same rows, which the first of them counts.
at::Tensor WholeModel::run_passes(const std::function<data::Batch()>& next, double scale) {
  const at::Tensor loss = passes_->run(next, scale);
  return mesh_.tp_rank == 0 ? loss : at::zeros_like(loss);
}

at::Tensor WholeModel::grad_squares() const {
  return engine().unit_grad_squares().sum().unsqueeze(0);
}

at::Tensor WholeModel::sum_over_ranks(const at::Tensor& squares) const {
  return sum_over_stage(engine(), squares.select(1, 0), mesh_.shape);
}

double WholeModel::sum_over_ranks(const std::vector<std::vector<double>>& squares) const {
  std::vector<double> by_rank;
  for (const std::vector<double>& rank : squares) by_rank.push_back(rank.front());
  return sum_over_stage(engine(), by_rank, mesh_.shape);
}

void WholeModel::sync_buffers() {
  if (reads_images_) parallel::sync_buffers(*model_, mesh_);
}

Scores WholeModel::evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) {
  const at::NoGradGuard no_grad;
  const Evaluating evaluating(*model_);
  Scores sum;
  for (const data::Batch& batch : batches) {
    const at::Tensor inputs = batch.inputs.to(device_), targets = batch.targets.to(device_);
    const nn::Documents documents = documents_on(device_, batch.documents);
    if (!reads_images_) {
      const double weight = batch.weight(),
                   loss = model_->loss(inputs, {.targets = targets, .documents = documents})
                              .to(at::kDouble)
                              .item<double>();
      if (weight > 0.0) sum += {.rows = weight, .loss = weight * loss};  // a mean over no targets is NaN
      if (metrics().empty()) continue;
    }
    const at::Tensor logits = model_->forward(inputs, documents);
    if (batch.rows == 0) continue;
    sum += {.own = own_sums(logits, targets)};
    if (!reads_images_) continue;
    if (guesses != nullptr) guesses->add(logits, targets, batch.samples);
    sum += score_images(logits, targets);
  }
  return mesh_.tp_rank == 0 ? sum : Scores();
}

std::vector<int32_t> WholeModel::generate(std::vector<int32_t> prompt, const SamplingOptions& options) {
  const parallel::DataParallel::Held held(engine());
  const Evaluating evaluating(*model_);
  const plan::TokenSplit split = plan::token_split(config_, mesh_.cp_rank);
  const auto next_logits = [this, split](const at::Tensor& tokens) {
    const at::Tensor mine = nn::tokens_of(padded(tokens, plan::length_multiple(config_)), split);
    const at::Tensor logits = logits_of_all(model_->forward(mine.to(device_)), split, mesh_);
    return logits.select(1, tokens.size(1) - 1).squeeze(0).to(at::kCPU, at::kFloat);
  };
  return train::generate(next_logits, std::move(prompt), options);
}

AdaptedModel WholeModel::adapted() {
  return adapted_model(engine(), config_.model, facts_);
}

void WholeModel::save_weights(const std::string& path, const parallel::Notes& notes) {
  if (!plan::has_adapters(config_)) return parallel::save_weights(engine(), path, notes);
  save_merged(*mesh_.all, adapted(), path, notes);
}

std::string WholeModel::base_digest() {
  std::vector<std::string> names;
  for (const plan::UnitSpec& unit : facts_.units) {
    for (const plan::ParamSpec& param : unit.frozen()) names.push_back(param.name);
  }
  return parallel::frozen_digest(engine(), names, engine_options(config_, mesh_, fp8_history()).compute);
}

std::string WholeModel::weights_digest() {
  return parallel::weights_digest(engine());
}

}  // namespace trireme::train
