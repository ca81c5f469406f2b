#include "trireme/train/adapter.h"

#include <ATen/ATen.h>

#include <memory>

#include "trireme/base/error_of.h"
#include "trireme/base/file.h"
#include "trireme/comm/agree.h"
#include "trireme/parallel/state_reader.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/peft.h"

namespace trireme::train {
namespace {

constexpr const char* kWeight = ".weight";
constexpr const char* kBaseNote = "base";

/// The names of a layer's A and B, by that of its weight.
std::pair<std::string, std::string> adapter_names(const std::string& weight) {
  const std::string module = weight.substr(0, weight.size() - std::string_view(kWeight).size());
  return {module + plan::kAdapterIn + kWeight, module + plan::kAdapterOut + kWeight};
}

/// Parameters of the model's facts that are frozen, or the others; `prefix` before their names.
parallel::TensorInfos infos_of(const plan::ModelFacts& facts, bool frozen, const std::string& prefix = "") {
  parallel::TensorInfos infos;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params)
      if (param.frozen == frozen) infos[prefix + param.name] = {param.shape, at::kFloat};
  }
  return infos;
}

}  // namespace

AdaptedModel adapted_model(parallel::DataParallel& engine, const plan::ModelConfig& config,
                           const plan::ModelFacts& facts) {
  const auto weights = std::make_shared<parallel::DataParallel::Weights>(engine);
  return {.config = config,
          .facts = facts,
          .visit_frozen = [&engine](const AdaptedModel::Body& body) { engine.visit_frozen(body); },
          .visit_trained = [&engine](const AdaptedModel::Body& body) { engine.visit_weights(body); },
          .trained = [weights](const std::string& name) { return weights->whole(name); }};
}

void save_merged(comm::Group& all, const AdaptedModel& model, const std::string& path,
                 const parallel::Notes& notes) {
  const parallel::TensorInfos adapters = infos_of(model.facts, /*frozen=*/false);
  const bool in_out = plan::record_of(model.config.family).in_out;
  const auto visit = [&](const AdaptedModel::Body& body) {
    model.visit_frozen([&](const std::string& name, const at::Tensor& values) {
      const auto [first, second] = adapter_names(name);
      if (!adapters.contains(first)) return body(name, values);
      const at::Tensor a = model.trained(first), b = model.trained(second);
      if (all.rank() != 0) return;
      const at::Tensor change = at::matmul(b, a).mul_(plan::scale_of(model.config.adapter));
      body(name, values + (in_out ? change.t() : change));
    });
  };
  parallel::save_weights(all, infos_of(model.facts, /*frozen=*/true), visit, path, notes);
}

void save_adapter(comm::Group& all, const AdaptedModel& model, const std::string& folder,
                  const std::string& base) {
  const auto visit = [&](const AdaptedModel::Body& body) {
    model.visit_trained(
        [&](const std::string& name, const at::Tensor& values) { body(plan::kPeftPrefix + name, values); });
  };
  parallel::save_weights(all, infos_of(model.facts, /*frozen=*/false, plan::kPeftPrefix), visit,
                         folder + "/" + plan::kPeftWeights, {{kBaseNote, base}});
  const auto error = error_of([&] {
    if (all.rank() == 0)
      write_file_atomic(folder + "/" + plan::kPeftConfig, plan::to_peft(model.config).dump(2) + "\n");
  });
  comm::throw_together(all, error, "train.adapter");
}

namespace {

/// "bf16 0123456789abcdef": digests of one dtype can be compared.
void check_base(const std::string& noted, const std::string& base, const std::string& folder) {
  const std::string dtype = base.substr(0, base.find(' ') + 1);
  if (noted == base || !noted.starts_with(dtype)) return;
  throw ConfigError(
      "[train.adapter] the adapters in {} were trained on weights with digest {}, but model.weights has {}; "
      "set it to the "
      "weights that they were trained on, not to those that they were added to",
      folder, noted, base);
}

}  // namespace

void load_adapter(comm::Group& all, const std::vector<std::shared_ptr<parallel::DataParallel>>& engines,
                  const plan::ModelFacts& facts, const std::string& folder, const std::string& base) {
  std::unique_ptr<parallel::StateReader> reader;
  const auto error = error_of([&] {
    const std::string path = folder + "/" + plan::kPeftWeights;
    const parallel::Notes notes = parallel::read_notes(path);
    if (const auto noted = notes.find(kBaseNote); noted != notes.end())
      check_base(noted->second, base, folder);
    reader = std::make_unique<parallel::StateReader>(path);
    for (const auto& [name, info] : infos_of(facts, /*frozen=*/false, plan::kPeftPrefix))
      reader->want(name, info.first, info.second);
    reader->check({}, /*ignores_optimizer=*/true);
  });
  comm::throw_together(all, error, "train.adapter");
  for (const auto& engine : engines)
    engine->load_values([](const std::string&) { return true; },
                        [&](const std::string& name, const plan::Region& region, at::Tensor& out) {
                          out.copy_(reader->read(plan::kPeftPrefix + name, region));
                        });
}

}  // namespace trireme::train
