#include "trireme/train/trained_model.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/top_k.h"
#include "trireme/parallel/tensor_joint.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/tensor/redistribute.h"
#include "trireme/train/program_call.h"
#include "trireme/train/staged_model.h"
#include "trireme/train/whole_model.h"

namespace trireme::train {

Scores score_images(const at::Tensor& logits, const at::Tensor& targets) {
  const auto number = [](const at::Tensor& scalar) { return scalar.to(at::kDouble).item<double>(); };
  const auto rows = static_cast<double>(logits.size(0));
  return {.rows = rows,
          .loss = rows * number(nn::cross_entropy(logits.to(at::kFloat), targets)),
          .top1 = number(nn::top_k_hits(logits, targets, 1)),
          .top5 = number(nn::top_k_hits(logits, targets, 5))};
}

TrainedModel::TrainedModel(const ModelSetup& setup)
    : model_config_(setup.config.model),
      facts_of_all_(setup.facts),
      metrics_(setup.metrics != nullptr ? *setup.metrics : std::vector<Metric>()),
      all_ranks_(setup.mesh.all) {
  const plan::Fp8Config& fp8 = setup.config.precision.fp8;
  if (fp8.recipe == plan::Fp8::kOff || fp8.scales != plan::Fp8Scales::kDelayed) return;
  fp8_history_ =
      std::make_unique<nn::Fp8History>(setup.config.model.n_layers, fp8.history, setup.mesh.world->device());
}

std::vector<double> TrainedModel::own_sums(const at::Tensor& logits, const at::Tensor& targets) const {
  std::vector<double> all;
  for (const Metric& metric : metrics_) {
    const std::vector<double> sums =
        call_of_program([&] { return metric.add(logits, targets); }, "add() of the metric '{}'", metric.name);
    if (std::ssize(sums) != metric.sums) {
      throw ConfigError("[train.program] add() of the metric '{}' has given {} sums instead of {}",
                        metric.name, sums.size(), metric.sums);
    }
    all.insert(all.end(), sums.begin(), sums.end());
  }
  return all;
}

/// Ranks of a pipeline have seen nothing of the blocks of others.
void TrainedModel::end_fp8_step() {
  if (!fp8_history_) return;
  at::Tensor seen = fp8_history_->seen();
  if (all_ranks_->size() > 1) seen.copy_(comm::gather_rows(*all_ranks_, seen).amax(0));
  fp8_history_->end_step();
}

std::string TrainedModel::nonfinite_parameter() const {
  for (const Part& part : parts_) {
    if (std::string name = part.engine->nonfinite_parameter(); !name.empty()) return name;
  }
  return {};
}

void TrainedModel::step(double lr, const optim::GradScale& scale) {
  for (const Part& part : parts_) {
    part.optimizer->set_lr(lr);
    part.engine->step_scaled(*part.optimizer, scale);
  }
  end_fp8_step();
}

void TrainedModel::skip_step() {
  for (const Part& part : parts_) part.engine->skip_step();
  end_fp8_step();
}

void TrainedModel::measure(bool on) {
  for (const Part& part : parts_) part.engine->measure(on);
}

parallel::CommTimes TrainedModel::take_times() {
  parallel::CommTimes times;
  for (const Part& part : parts_) times += part.engine->take_times();
  return times;
}

plan::StateBytes TrainedModel::state_bytes() const {
  plan::StateBytes bytes;
  for (const Part& part : parts_) {
    bytes += part.engine->state_bytes();
    bytes.optimizer += part.optimizer->state_bytes();
  }
  return bytes;
}

/// Engines of one rank share their groups.
int64_t TrainedModel::symmetric_bytes() const {
  return parts_.empty() ? 0 : parts_.front().engine->symmetric_bytes();
}

void TrainedModel::average_parameters() {
  for (const Part& part : parts_) part.engine->average_parameters();
}

void TrainedModel::swap_averages() {
  for (const Part& part : parts_) part.engine->swap_averages(*part.optimizer);
}

void TrainedModel::load_weights(const std::string& path, bool stages) {
  for (const Part& part : parts_) parallel::load_weights(*part.engine, path, {.unexpected = stages});
}

void TrainedModel::load_base(const std::string& path, bool stages) {
  for (const Part& part : parts_) parallel::load_frozen(*part.engine, path, {.unexpected = stages});
}

void TrainedModel::load_adapter(const std::string& folder, const std::string& base) {
  std::vector<std::shared_ptr<parallel::DataParallel>> engines;
  for (const Part& part : parts_) engines.push_back(part.engine);
  train::load_adapter(*all_ranks_, engines, model_config_, facts_of_all_, folder, base);
}

void TrainedModel::save_adapter(const std::string& folder, const std::string& base) {
  train::save_adapter(*all_ranks_, adapted(), folder, base);
}

nn::JointPtr joint_of(const plan::ModelConfig& model, const comm::Mesh& mesh) {
  if (mesh.tp->size() == 1) return nullptr;
  return parallel::make_joint(mesh, plan::split_vocabulary(model, mesh.tp->size()));
}

nn::ContextPtr context_of(const plan::Config& config, const comm::Mesh& mesh) {
  if (mesh.cp->size() == 1) return nullptr;
  return parallel::make_context(mesh, plan::token_split(config, mesh.cp_rank), config.parallel.overlap);
}

at::Tensor logits_of_all(const at::Tensor& logits, const plan::TokenSplit& tokens, const comm::Mesh& mesh) {
  const at::Tensor all = tensor::redistribute(logits, plan::TensorPlacement::shard(1),
                                              plan::TensorPlacement::replicate(), *mesh.cp);
  return nn::in_order(all, tokens);
}

at::Tensor sum_over_stage(const parallel::DataParallel& engine, const at::Tensor& by_rank,
                          const plan::MeshShape& mesh) {
  const int64_t tp = mesh.size(plan::Axis::kTp);
  if (tp == 1) return engine.sum_over_ranks(by_rank);
  const at::Tensor by_place = by_rank.view({-1, tp});
  at::Tensor sum = at::zeros({}, by_rank.options());
  for (int64_t rank = 0; rank < tp; ++rank)
    sum += engine.sum_over_ranks(by_place.select(1, rank).contiguous());
  return sum;
}

double sum_over_stage(const parallel::DataParallel& engine, const std::vector<double>& by_rank,
                      const plan::MeshShape& mesh) {
  const auto tp = static_cast<size_t>(mesh.size(plan::Axis::kTp));
  double sum = 0.0;
  for (size_t rank = 0; rank < tp; ++rank) {
    std::vector<double> of_place;
    for (size_t at = rank; at < by_rank.size(); at += tp) of_place.push_back(by_rank[at]);
    sum += engine.sum_over_ranks(of_place);
  }
  return sum;
}

plan::StepProgram given_program(const ModelSetup& setup) {
  const plan::Device device = setup.mesh.world->device().is_cpu() ? plan::Device::kCpu : plan::Device::kCuda;
  const plan::EngineSetting setting =
      plan::engine_setting(setup.config, setup.mesh.shape, setup.batch.accumulation, device);
  return plan::config_program(setup.config, setup.held, setup.batch, setting, setup.mesh.pp_rank);
}

std::unique_ptr<TrainedModel> make_trained_model(const ModelSetup& setup) {
  if (setup.config.parallel.pp > 1) return std::make_unique<StagedModel>(setup);
  return std::make_unique<WholeModel>(setup);
}

}  // namespace trireme::train
