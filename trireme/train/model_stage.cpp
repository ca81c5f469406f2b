#include "trireme/train/model_stage.h"

#include <set>

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/vision_model.h"
#include "trireme/train/connect.h"

namespace trireme::train {
namespace {

/// A module in the tree of a stage.
struct Branch : torch::nn::Module {};

/// A module of the tree, and a name in it.
struct Place {
  torch::nn::Module& module;
  std::string name;
};

/// Parameters and buffers have the names of their modules in front.
Place place_of(torch::nn::Module& module, const std::string& name) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) return {module, name};
  const std::string child = name.substr(0, dot);
  if (!module.named_children().contains(child)) module.register_module(child, std::make_shared<Branch>());
  return place_of(*module.named_children()[child], name.substr(dot + 1));
}

std::vector<plan::UnitSpec> units_of(const plan::ModelConfig& config, plan::UnitRange range,
                                     const plan::TensorSplit& split, const plan::Fp8Config& fp8 = {}) {
  return plan::stage_units(config, plan::describe(config, config.max_seq_len, {.fp8 = fp8}, {}, split),
                           range);
}

}  // namespace

ModelStage::ModelStage(const plan::ModelConfig& config, plan::UnitRange range,
                       std::shared_ptr<nn::Model> model, plan::TensorSplit split)
    : config_(config),
      split_(split),
      model_(model ? std::move(model) : nn::build(plan::split_model(config, split))),
      range_(range) {
  TRIREME_CHECK(0 <= range.first && range.first < range.end && range.end <= config.n_layers + 2,
                "[train.model_stage] units {} to {} of a model that has {}", range.first, range.end,
                config.n_layers + 2);
  if (range.vocabulary) {
    at::Tensor weight = text().head_weight();
    weight.set_data(
        at::empty({range.vocabulary->size(), weight.size(1)}, weight.options().requires_grad(false)));
  }
  adopt(units_of(config, range, split));
}

/// What these units have becomes this module's, under the same names.
void ModelStage::adopt(const std::vector<plan::UnitSpec>& units) {
  std::set<std::string> names;
  for (const plan::UnitSpec& unit : units) {
    for (const plan::ParamSpec& param : unit.params) names.insert(param.name);
  }
  if (plan::reads_images(config_.family)) {
    for (const plan::BufferSpec& buffer : plan::buffers_of(config_.vision, units)) names.insert(buffer.name);
  }
  for (const auto& entry : model_->named_parameters()) {
    if (!names.contains(entry.key())) continue;
    const auto [module, name] = place_of(*this, entry.key());
    module.register_parameter(name, entry.value());
  }
  for (const auto& entry : model_->named_buffers()) {
    if (!names.contains(entry.key())) continue;
    const auto [module, name] = place_of(*this, entry.key());
    module.register_buffer(name, entry.value());
  }
}

/// Messages between ranks are contiguous.
bool ModelStage::moves_channels() const {
  return plan::reads_images(config_.family) && config_.vision.channels_last;
}

at::Tensor ModelStage::forward(const at::Tensor& x) const {
  TRIREME_CHECK(!range_.vocabulary, "[train.model_stage] a part of the head has no output; call part()");
  return is_last() ? x : run(model_->units_in(documents_), x);
}

namespace {

/// A half of a block. What computes the block again does not compute the half.
nn::Unit half_of(const nn::Unit& block, const char* half, const nn::UnitForward& forward) {
  return {.name = block.name + half, .forward = forward, .draws = block.draws};
}

}  // namespace

/// This stage's of the model's units.
at::Tensor ModelStage::run(std::vector<nn::Unit> units, const at::Tensor& x) const {
  const auto first = static_cast<size_t>(range_.first), last = static_cast<size_t>(range_.end) - 1;
  if (range_.from_mlp) units[first] = half_of(units[first], plan::kMlpHalf, units[first].mlp);
  if (range_.to_attention) units[last] = half_of(units[last], plan::kAttentionHalf, units[last].attention);
  if (range_.norm_alone) units[last] = text().final_norm();
  const bool arrives = range_.first > 0 && moves_channels() && x.dim() == 4;
  const at::Tensor y =
      model_->run(std::span(units).subspan(first, last + 1 - first), arrives ? x.permute({0, 3, 1, 2}) : x);
  const bool leaves = last + 1 < units.size() && moves_channels() && y.dim() == 4;
  return leaves ? y.permute({0, 2, 3, 1}) : y;
}

at::Tensor ModelStage::loss(const at::Tensor& x, const nn::LossTarget& target) const {
  TRIREME_CHECK(is_last(), "[train.model_stage] units {} to {} have no loss", range_.first, range_.end);
  nn::LossTarget with_documents = target;
  with_documents.documents = documents_;
  return run(model_->units(with_documents), x);
}

at::Tensor ModelStage::logits(const at::Tensor& x) const {
  if (range_.vocabulary)
    return run_part([weight = text().head_weight()](const at::Tensor& y) { return nn::logits(y, weight); },
                    x);
  TRIREME_CHECK(is_last(), "[train.model_stage] units {} to {} have no logits", range_.first, range_.end);
  return run(model_->units_in(documents_), x);
}

at::Tensor ModelStage::run_part(const nn::UnitForward& forward, const at::Tensor& hidden) const {
  const nn::Unit unit{.name = plan::kHeadUnit, .forward = forward};
  return model_->run(std::span(&unit, 1), hidden);
}

nn::VocabularyPart ModelStage::part(const at::Tensor& hidden, const nn::LossTarget& target) const {
  TRIREME_CHECK(range_.vocabulary, "[train.model_stage] units {} to {} are no part of the head", range_.first,
                range_.end);
  nn::VocabularyPart made;
  made.stats = run_part(
      [&, weight = text().head_weight(), first = range_.vocabulary->begin](const at::Tensor& x) {
        made = nn::vocabulary_part(x, weight, first, target);
        return made.stats;
      },
      hidden);
  return made;
}

void ModelStage::train(bool on) {
  Module::train(on);
  model_->train(on);
}

void ModelStage::fill(const nn::InitialWeights& initial) const {
  const at::NoGradGuard no_grad;
  const auto parameters = named_parameters();
  for (const plan::UnitSpec& unit : units_of(config_, range_, split_)) {
    for (const plan::ParamSpec& param : unit.params) {
      at::Tensor flat = parameters[param.name].view({-1});
      initial(param.name, param.part.region(param.shape, {0, param.numel()}), flat);
    }
  }
}

std::shared_ptr<parallel::DataParallel> ModelStage::make_engine(
    const comm::Mesh& mesh, const parallel::Options& options, const nn::InitialWeights& initial,
    const plan::MemoryConfig& memory, const plan::Fp8Config& fp8, const nn::Fp8History* history) {
  auto engine = std::make_shared<parallel::DataParallel>(*this, units_of(config_, range_, split_, fp8), mesh,
                                                         options, initial);
  connect(*model_, *engine, memory, fp8, history);
  return engine;
}

std::optional<std::string> ModelStage::tied_parameter(const plan::ModelConfig& config) {
  if (!config.tie_embeddings) return std::nullopt;
  return plan::record_of(config.family).embeddings(config).front().name;
}

std::vector<parallel::TiedParameter> ModelStage::ties(const plan::ModelConfig& config,
                                                      const plan::PipelinePlan& pipeline) {
  const auto name = tied_parameter(config);
  if (!name) return {};
  const plan::Schedule& schedule = pipeline.schedule;
  if (!schedule.spread_head)
    return {{.stage = 0, .name = *name, .other_stage = schedule.stages - 1, .other_name = *name}};
  std::vector<parallel::TiedParameter> ties;
  for (int64_t part = schedule.stages; part < schedule.all_stages(); ++part)
    ties.push_back({.stage = 0,
                    .name = *name,
                    .other_stage = part,
                    .other_name = *name,
                    .first_row = plan::units_of_stage(pipeline.split, part).vocabulary->begin});
  return ties;
}

}  // namespace trireme::train
