#include "trireme/train/whole_model.h"

#include <ATen/ATen.h>

#include "trireme/nn/init.h"
#include "trireme/parallel/state_file.h"
#include "trireme/plan/buckets.h"
#include "trireme/train/connect.h"
#include "trireme/train/engine_options.h"

namespace trireme::train {
namespace {

Passes::Options pass_options(const ModelSetup& setup) {
  const bool always = setup.config.train.cuda_graphs == plan::CudaGraphs::kOn;
  return {.accumulation = setup.batch.accumulation,
          .loss_chunk_bytes = setup.config.memory.loss_chunk_mib << 20,
          .make_recording = setup.records_passes ? parallel::recordings() : parallel::RecordingMaker(),
          .when = always ? Passes::When::kAlways : Passes::When::kDeviceIdles};
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

WholeModel::WholeModel(const ModelSetup& setup)
    : model_(nn::build(setup.config.model)), device_(setup.mesh.world->device()) {
  const plan::Config& config = setup.config;
  const bool buckets = config.parallel.bucket_mib > 0.0;
  auto engine = std::make_shared<parallel::DataParallel>(
      *model_, plan::engine_units(config, setup.facts), setup.mesh, engine_options(config, setup.mesh),
      nn::InitialWeights(config.model, static_cast<uint64_t>(config.seed)),
      buckets ? parallel::UseFrom::kBuckets : parallel::UseFrom::kRunUnit);
  connect(*model_, *engine, config.memory);
  for (const parallel::FlatUnit* unit : engine->units()) units_.push_back(unit->name());
  passes_ = std::make_unique<Passes>(*model_, *engine, device_, pass_options(setup));
  auto optimizer = optim::build(config.optim, engine->optimizer_params());
  parts_.push_back({.engine = std::move(engine), .optimizer = std::move(optimizer)});
}

/// Engines refer to the model.
WholeModel::~WholeModel() {
  passes_.reset();
  parts_.clear();
}

at::Tensor WholeModel::run_passes(const std::function<data::Batch()>& next, double scale) {
  return passes_->run(next, scale);
}

at::Tensor WholeModel::grad_squares() const {
  return engine().unit_grad_squares().sum().unsqueeze(0);
}

at::Tensor WholeModel::sum_over_ranks(const at::Tensor& squares) const {
  return engine().sum_over_ranks(squares.select(1, 0));
}

double WholeModel::sum_over_ranks(const std::vector<std::vector<double>>& squares) const {
  std::vector<double> by_rank;
  for (const std::vector<double>& rank : squares) by_rank.push_back(rank.front());
  return engine().sum_over_ranks(by_rank);
}

double WholeModel::evaluate(const std::vector<data::Batch>& batches, const std::vector<int64_t>& rows,
                            int64_t /*all_rows*/) {
  const at::NoGradGuard no_grad;
  const Evaluating evaluating(*model_);
  double sum = 0.0;
  for (size_t i = 0; i < batches.size(); ++i) {
    const at::Tensor loss = model_->loss(batches[i].inputs.to(device_), batches[i].targets.to(device_));
    sum += loss.item<double>() * static_cast<double>(rows[i]);
  }
  return sum;
}

std::vector<int32_t> WholeModel::generate(std::vector<int32_t> prompt, const SamplingOptions& options) {
  const parallel::DataParallel::Held held(engine());
  const Evaluating evaluating(*model_);
  return train::generate(*model_, std::move(prompt), options, device_);
}

void WholeModel::save_weights(const std::string& path) {
  parallel::save_weights(engine(), path);
}

std::string WholeModel::weights_digest() {
  return parallel::weights_digest(engine());
}

}  // namespace trireme::train
