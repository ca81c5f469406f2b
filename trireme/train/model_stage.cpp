#include "trireme/train/model_stage.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/train/connect.h"

namespace trireme::train {
namespace {

/// A module's own parameters have no dots in their names.
std::string as_one_word(std::string name) {
  std::ranges::replace(name, '.', '_');
  return name;
}

std::vector<plan::UnitSpec> units_of(const plan::ModelConfig& config) {
  return plan::describe(config, config.max_seq_len).units;
}

/// Which parameters units [first, last) of a model use.
std::map<std::string, std::string> names_in(const plan::ModelConfig& config, size_t first, size_t last) {
  std::map<std::string, std::string> names;
  const auto add = [&](const plan::ParamSpec& param) { names[param.name] = as_one_word(param.name); };
  const auto units = units_of(config);
  for (size_t unit = first; unit < std::min(last, units.size()); ++unit)
    std::ranges::for_each(units[unit].params, add);
  if (!config.tie_embeddings) return names;
  // A tied head's parameters are in the unit of the embeddings.
  const bool has_head = last == static_cast<size_t>(config.n_layers) + 2;
  const plan::ModelFamilyRecord& family = plan::record_of(config.family);
  for (const plan::ParamSpec& param : family.final_norm(config)) {
    names.erase(param.name);
    if (has_head) add(param);
  }
  if (has_head) add(family.embeddings(config).front());
  return names;
}

}  // namespace

ModelStage::ModelStage(const plan::ModelConfig& config, size_t first, size_t last)
    : config_(config), model_(nn::build(config)), first_(first), last_(last) {
  const size_t units = static_cast<size_t>(config.n_layers) + 2;
  TRIREME_CHECK(first < last && last <= units, "[train.model_stage] units {} to {} of a model that has {}",
                first, last, units);
  names_ = names_in(config, first, last);
  for (const auto& entry : model_->named_parameters()) {
    const auto name = names_.find(entry.key());
    if (name != names_.end()) register_parameter(name->second, entry.value());
  }
}

at::Tensor ModelStage::forward(const at::Tensor& x) const {
  if (is_last()) return x;
  const std::vector<nn::Unit> units = model_->units();
  return model_->run(std::span(units).subspan(first_, last_ - first_), x);
}

at::Tensor ModelStage::loss(const at::Tensor& x, const nn::LossTarget& target) const {
  TRIREME_CHECK(is_last(), "[train.model_stage] units {} to {} have no loss", first_, last_);
  const std::vector<nn::Unit> units = model_->units(target);
  return model_->run(std::span(units).subspan(first_), x);
}

void ModelStage::fill(const nn::InitialWeights& initial) const {
  const at::NoGradGuard no_grad;
  const auto params = named_parameters(/*recurse=*/false);
  for (const auto& [name, here] : names_) {
    at::Tensor flat = params[here].view({-1});
    initial(name, 0, flat);
  }
}

std::shared_ptr<parallel::DataParallel> ModelStage::make_engine(const comm::Mesh& mesh,
                                                                const parallel::Options& options,
                                                                const nn::InitialWeights& initial,
                                                                const plan::MemoryConfig& memory) {
  std::vector<plan::UnitSpec> units;
  std::map<std::string, std::string> in_model;
  for (const auto& [name, here] : names_) in_model[here] = name;
  for (const plan::UnitSpec& unit : units_of(config_)) {
    plan::UnitSpec mine{unit.name, {}};
    for (plan::ParamSpec param : unit.params) {
      const auto name = names_.find(param.name);
      if (name == names_.end()) continue;
      param.name = name->second;
      mine.params.push_back(param);
    }
    const bool is_root = units.empty();
    if (is_root || !mine.params.empty()) units.push_back(std::move(mine));
  }
  auto engine = std::make_shared<parallel::DataParallel>(
      *this, units, mesh, options,
      [initial, in_model](const std::string& name, int64_t from, at::Tensor& out) {
        initial(in_model.at(name), from, out);
      });
  connect(*model_, *engine, memory);
  return engine;
}

std::optional<std::string> ModelStage::tied_parameter(const plan::ModelConfig& config) {
  if (!config.tie_embeddings) return std::nullopt;
  return as_one_word(plan::record_of(config.family).embeddings(config).front().name);
}

}  // namespace trireme::train
