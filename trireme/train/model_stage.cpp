#include "trireme/train/model_stage.h"

#include <set>

#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"
#include "trireme/train/connect.h"

namespace trireme::train {
namespace {

/// A module in the tree of a stage.
struct Branch : torch::nn::Module {};

/// Parameters have the names of their modules in front.
void register_under(torch::nn::Module& module, const std::string& name, const at::Tensor& parameter) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) {
    module.register_parameter(name, parameter);
    return;
  }
  const std::string child = name.substr(0, dot);
  if (!module.named_children().contains(child)) module.register_module(child, std::make_shared<Branch>());
  register_under(*module.named_children()[child], name.substr(dot + 1), parameter);
}

std::vector<plan::UnitSpec> units_of(const plan::ModelConfig& config, plan::UnitRange range,
                                     const plan::Fp8Config& fp8 = {}) {
  return plan::stage_units(config, plan::describe(config, config.max_seq_len, {.fp8 = fp8}), range);
}

}  // namespace

ModelStage::ModelStage(const plan::ModelConfig& config, plan::UnitRange range)
    : config_(config), model_(nn::build(config)), range_(range) {
  TRIREME_CHECK(0 <= range.first && range.first < range.end && range.end <= config.n_layers + 2,
                "[train.model_stage] units {} to {} of a model that has {}", range.first, range.end,
                config.n_layers + 2);
  std::set<std::string> names;
  for (const plan::UnitSpec& unit : units_of(config, range)) {
    for (const plan::ParamSpec& param : unit.params) names.insert(param.name);
  }
  for (const auto& entry : model_->named_parameters()) {
    if (names.contains(entry.key())) register_under(*this, entry.key(), entry.value());
  }
}

at::Tensor ModelStage::forward(const at::Tensor& x) const {
  return is_last() ? x : run(model_->units(), x);
}

/// This stage's of the model's units.
at::Tensor ModelStage::run(std::vector<nn::Unit> units, const at::Tensor& x) const {
  const auto first = static_cast<size_t>(range_.first), last = static_cast<size_t>(range_.end) - 1;
  if (range_.from_mlp) {
    units[first].name += plan::kMlpHalf;
    units[first].forward = units[first].mlp;
  }
  if (range_.to_attention) {
    units[last].name += plan::kAttentionHalf;
    units[last].forward = units[last].attention;
  }
  return model_->run(std::span(units).subspan(first, last + 1 - first), x);
}

at::Tensor ModelStage::loss(const at::Tensor& x, const nn::LossTarget& target) const {
  TRIREME_CHECK(is_last(), "[train.model_stage] units {} to {} have no loss", range_.first, range_.end);
  return run(model_->units(target), x);
}

at::Tensor ModelStage::logits(const at::Tensor& x) const {
  TRIREME_CHECK(is_last(), "[train.model_stage] units {} to {} have no logits", range_.first, range_.end);
  return run(model_->units(), x);
}

void ModelStage::train(bool on) {
  Module::train(on);
  model_->train(on);
}

void ModelStage::fill(const nn::InitialWeights& initial) const {
  const at::NoGradGuard no_grad;
  for (const auto& entry : named_parameters()) {
    at::Tensor flat = entry.value().view({-1});
    initial(entry.key(), 0, flat);
  }
}

std::shared_ptr<parallel::DataParallel> ModelStage::make_engine(
    const comm::Mesh& mesh, const parallel::Options& options, const nn::InitialWeights& initial,
    const plan::MemoryConfig& memory, const plan::Fp8Config& fp8, const nn::Fp8History* history) {
  auto engine =
      std::make_shared<parallel::DataParallel>(*this, units_of(config_, range_, fp8), mesh, options, initial);
  connect(*model_, *engine, memory, fp8, history);
  return engine;
}

std::optional<std::string> ModelStage::tied_parameter(const plan::ModelConfig& config) {
  if (!config.tie_embeddings) return std::nullopt;
  return plan::record_of(config.family).embeddings(config).front().name;
}

}  // namespace trireme::train
