#include "trireme/train/trained_model.h"

#include <ATen/ATen.h>

#include <optional>

#include "trireme/nn/language_model.h"
#include "trireme/parallel/wrap.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/tensor/redistribute.h"
#include "trireme/train/staged_passes.h"
#include "trireme/train/whole_passes.h"

namespace trireme::train {
namespace {

std::unique_ptr<nn::Fp8History> make_history(const ModelSetup& setup) {
  const plan::Fp8Config& fp8 = setup.config.precision.fp8;
  if (fp8.recipe == plan::Fp8::kOff || fp8.scales != plan::Fp8Scales::kDelayed) return nullptr;
  return std::make_unique<nn::Fp8History>(setup.config.model.n_layers, fp8.history,
                                          setup.mesh.world->device());
}

/// The sum of one number for each rank of a stage, in the order of their ranks, over its data-parallel ranks
/// as its engine has it (DataParallel::sum_over_ranks), then over those along tp.
at::Tensor sum_over_stage(const parallel::DataParallel& engine, const at::Tensor& by_rank, int64_t tp) {
  if (tp == 1) return engine.sum_over_ranks(by_rank);
  const at::Tensor by_place = by_rank.view({-1, tp});
  at::Tensor sum = at::zeros({}, by_rank.options());
  for (int64_t rank = 0; rank < tp; ++rank)
    sum += engine.sum_over_ranks(by_place.select(1, rank).contiguous());
  return sum;
}

double sum_over_stage(const parallel::DataParallel& engine, const std::vector<double>& by_rank, size_t tp) {
  double sum = 0.0;
  for (size_t rank = 0; rank < tp; ++rank) {
    std::vector<double> of_place;
    for (size_t at = rank; at < by_rank.size(); at += tp) of_place.push_back(by_rank[at]);
    sum += engine.sum_over_ranks(of_place);
  }
  return sum;
}

}  // namespace

TrainedModel::TrainedModel(const ModelSetup& setup)
    : config_(setup.config),
      facts_(setup.facts),
      mesh_(setup.mesh),
      metrics_(setup.metrics != nullptr ? *setup.metrics : std::vector<Metric>()),
      plan_(plan_stages(setup.config, setup.facts, setup.held, setup.batch)),
      fp8_history_(make_history(setup)) {
  if (in_one_piece()) {
    passes_ = std::make_unique<WholePasses>(setup, fp8_history(), stages_);
  } else {
    passes_ = std::make_unique<StagedPasses>(setup, *plan_.pipeline, fp8_history(), stages_);
  }
  for (TrainedStage& stage : stages_)
    stage.optimizer = optim::build(config_.optim, stage.engine->optimizer_params());
}

/// The first rank of each pipeline counts its losses, and the first of those along tp.
at::Tensor TrainedModel::run_passes(const std::function<data::Batch()>& next, double scale) {
  const at::Tensor loss = passes_->run(next, scale);
  return mesh_.pp_rank == 0 && mesh_.tp_rank == 0 ? loss : at::zeros_like(loss);
}

/// The copies of a stage that two ranks have are parts of one gradient.
at::Tensor TrainedModel::grad_squares() const {
  const int64_t stages = plan_.stages();
  at::Tensor squares = at::zeros({stages + std::ssize(plan_.units)},
                                 at::TensorOptions().device(mesh_.world->device()).dtype(at::kDouble));
  for (const TrainedStage& stage : stages_) {
    const at::Tensor by_unit = stage.engine->unit_grad_squares();
    const int64_t first = stages + plan_.first_unit[static_cast<size_t>(stage.index)];
    squares[stage.index].copy_(by_unit.sum());
    squares.narrow(0, first, by_unit.numel()).copy_(by_unit);
  }
  return squares;
}

at::Tensor TrainedModel::sum_over_ranks(const at::Tensor& squares) const {
  const int64_t ranks = mesh_.stage->size(), tp = mesh_.tp->size();
  at::Tensor sum;
  for (int64_t stage = 0; stage < plan_.stages(); ++stage) {
    std::vector<at::Tensor> by_rank;
    for (const int64_t pp_rank : plan_.holders[static_cast<size_t>(stage)])
      by_rank.push_back(squares.select(1, stage).narrow(0, pp_rank * ranks, ranks));
    const at::Tensor of_stage =
        sum_over_stage(engine(), by_rank.size() == 1 ? by_rank.front() : at::cat(by_rank), tp);
    sum = sum.defined() ? sum + of_stage : of_stage;
  }
  return sum;
}

double TrainedModel::sum_over_ranks(const std::vector<std::vector<double>>& squares) const {
  const int64_t ranks = mesh_.stage->size();
  double sum = 0.0;
  for (size_t stage = 0; stage < plan_.holders.size(); ++stage) {
    std::vector<double> by_rank;
    for (const int64_t pp_rank : plan_.holders[stage]) {
      for (int64_t rank = pp_rank * ranks; rank < (pp_rank + 1) * ranks; ++rank)
        by_rank.push_back(squares[static_cast<size_t>(rank)][stage]);
    }
    sum += sum_over_stage(engine(), by_rank, static_cast<size_t>(mesh_.tp->size()));
  }
  return sum;
}

std::string TrainedModel::nonfinite_parameter() const {
  for (const TrainedStage& stage : stages_) {
    if (std::string name = stage.engine->nonfinite_parameter(); !name.empty()) return name;
  }
  return {};
}

void TrainedModel::step(double lr, const optim::GradScale& scale) {
  for (const TrainedStage& stage : stages_) {
    stage.optimizer->set_lr(lr);
    stage.engine->step_scaled(*stage.optimizer, scale);
  }
  end_fp8_step();
}

void TrainedModel::skip_step() {
  for (const TrainedStage& stage : stages_) stage.engine->skip_step();
  end_fp8_step();
}

/// Ranks of a pipeline have seen nothing of the blocks of others.
void TrainedModel::end_fp8_step() {
  if (!fp8_history_) return;
  at::Tensor seen = fp8_history_->seen();
  if (mesh_.all->size() > 1) seen.copy_(comm::gather_rows(*mesh_.all, seen).amax(0));
  fp8_history_->end_step();
}

int64_t TrainedModel::sent_bytes() const {
  const int64_t between_stages = passes_->sent_bytes();
  return engine().sent_bytes() + between_stages;
}

void TrainedModel::measure(bool on) {
  for (const TrainedStage& stage : stages_) stage.engine->measure(on);
}

parallel::CommTimes TrainedModel::take_times() {
  parallel::CommTimes times;
  for (const TrainedStage& stage : stages_) times += stage.engine->take_times();
  return times;
}

plan::StateBytes TrainedModel::state_bytes() const {
  plan::StateBytes bytes;
  for (const TrainedStage& stage : stages_) {
    bytes += stage.engine->state_bytes();
    bytes.optimizer += stage.optimizer->state_bytes();
  }
  return bytes;
}

/// Stages share no buffers, so each follows the first of its data-parallel ranks.
void TrainedModel::sync_buffers() {
  if (!plan::reads_images(config_.model.family)) return;
  for (const TrainedStage& stage : stages_) parallel::sync_buffers(*stage.module, stage.engine->mesh());
}

namespace {

/// Modules without dropout, for a while.
class Evaluating {
 public:
  explicit Evaluating(const std::vector<TrainedStage>& stages) : stages_(stages) { set_training(false); }
  ~Evaluating() { set_training(true); }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  void set_training(bool on) {
    for (const TrainedStage& stage : stages_) stage.module->train(on);
  }

  const std::vector<TrainedStage>& stages_;
};

/// Logits (1, T / n, V) of the tokens of each rank along cp -> those of all, (1, T, V). Collective over them.
at::Tensor logits_of_all(const at::Tensor& logits, const plan::TokenSplit& tokens, const comm::Mesh& mesh) {
  const at::Tensor all = tensor::redistribute(logits, plan::TensorPlacement::shard(1),
                                              plan::TensorPlacement::replicate(), *mesh.cp);
  return nn::in_order(all, tokens);
}

}  // namespace

Scores TrainedModel::evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) {
  const at::NoGradGuard no_grad;
  const Evaluating evaluating(stages_);
  return passes_->evaluate(batches, metrics_, guesses);
}

/// (1, T) tokens -> (V) logits for the next one, fp32 on the CPU of every rank.
at::Tensor TrainedModel::next_logits(const at::Tensor& tokens) {
  const plan::TokenSplit split = plan::token_split(config_, mesh_.cp_rank);
  const at::Tensor mine = nn::tokens_of(padded(tokens, plan::length_multiple(config_)), split);
  const auto last = [&, at = tokens.size(1) - 1](const at::Tensor& logits) {
    return logits_of_all(logits, split, mesh_).select(1, at).squeeze(0).to(at::kFloat);
  };
  return passes_->infer(mine.to(mesh_.world->device()), last).to(at::kCPU);
}

/// A model in one piece gathers its parameters once for all tokens; stages gather them in each pass.
std::vector<int32_t> TrainedModel::generate(std::vector<int32_t> prompt, const SamplingOptions& options) {
  std::optional<parallel::DataParallel::Held> held;
  if (in_one_piece()) held.emplace(engine());
  const Evaluating evaluating(stages_);
  return train::generate([this](const at::Tensor& seen) { return next_logits(seen); }, std::move(prompt),
                         options);
}

void TrainedModel::average_parameters() {
  for (const TrainedStage& stage : stages_) stage.engine->average_parameters();
}

void TrainedModel::swap_averages() {
  for (const TrainedStage& stage : stages_) stage.engine->swap_averages(*stage.optimizer);
}

}  // namespace trireme::train
