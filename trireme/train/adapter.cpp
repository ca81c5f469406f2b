#include "trireme/train/adapter.h"

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <span>

#include "trireme/base/error_of.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/low_rank.h"
#include "trireme/comm/agree.h"
#include "trireme/parallel/box.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/peft.h"
#include "trireme/state/state_reader.h"

namespace trireme::train {
namespace {

constexpr const char* kBaseNote = "base";

/// The elements of a contiguous tensor of fp32 on the CPU.
std::span<float> span_of(const at::Tensor& values) {
  return {values.data_ptr<float>(), static_cast<size_t>(values.numel())};
}

/// A weight as the family keeps it, in contiguous fp32.
checkpoint::LayerWeight layer_weight(const at::Tensor& weight, const plan::ModelConfig& model) {
  return checkpoint::layer_weight(span_of(weight), weight.sizes().vec(),
                                  plan::record_of(model.family).in_out);
}

/// (out) of a weight as the family keeps it.
at::Tensor lengths_of_rows(const at::Tensor& weight, const plan::ModelConfig& model) {
  const at::Tensor values = weight.contiguous();
  return at::tensor(checkpoint::lengths_of_rows(layer_weight(values, model)), at::kFloat);
}

/// Where lengths are trained, those of frozen rows, to which what is trained is added: by the names of what
/// is.
using Lengths = std::map<std::string, at::Tensor>;
void note_lengths(Lengths& lengths, const std::string& name, const at::Tensor& values,
                  const state::TensorInfos& adapters, const plan::ModelConfig& model) {
  const std::string magnitude = plan::adapter_names(name).magnitude;
  if (values.defined() && adapters.contains(magnitude)) lengths[magnitude] = lengths_of_rows(values, model);
}

/// Parameters of the model's facts that are frozen, or the others; `prefix` before their names.
state::TensorInfos infos_of(const plan::ModelFacts& facts, bool frozen, const std::string& prefix = "") {
  state::TensorInfos infos;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params)
      if (param.frozen == frozen) infos[prefix + param.name] = {param.shape, at::kFloat};
  }
  return infos;
}

}  // namespace

void save_merged(comm::Group& all, const AdaptedModel& model, const std::string& path,
                 const state::Notes& notes) {
  const state::TensorInfos adapters = infos_of(model.facts, /*frozen=*/false);
  const auto visit = [&](const AdaptedModel::Body& body) {
    model.visit_frozen([&](const std::string& name, const at::Tensor& values) {
      const plan::AdapterNames names = plan::adapter_names(name);
      if (!adapters.contains(names.first)) return body(name, values);
      const at::Tensor first = model.trained(names.first), second = model.trained(names.second);
      const bool scales = adapters.contains(names.magnitude);
      const at::Tensor longer = scales ? model.trained(names.magnitude) : at::Tensor();
      if (all.rank() != 0) return;
      const at::Tensor sum = values.clone(at::MemoryFormat::Contiguous),
                       lengths = scales ? lengths_of_rows(values, model.config) + longer
                                        : at::empty({0}, at::kFloat);
      checkpoint::add_low_rank(layer_weight(sum, model.config),
                               {.first = span_of(first),
                                .second = span_of(second),
                                .scale = plan::scale_of(model.config.adapter),
                                .lengths = span_of(lengths)});
      body(name, sum);
    });
  };
  state::save_weights(all, infos_of(model.facts, /*frozen=*/true), visit, path, notes);
}

void save_adapter(comm::Group& all, const AdaptedModel& model, const std::string& folder,
                  const std::string& base) {
  const state::TensorInfos adapters = infos_of(model.facts, /*frozen=*/false);
  const auto visit = [&](const AdaptedModel::Body& body) {
    Lengths lengths;
    if (model.config.adapter.kind == plan::AdapterKind::kDora)
      model.visit_frozen([&](const std::string& name, const at::Tensor& values) {
        note_lengths(lengths, name, values, adapters, model.config);
      });
    model.visit_trained([&](const std::string& name, const at::Tensor& values) {
      const auto added = lengths.find(name);
      body(plan::kPeftPrefix + name, added == lengths.end() ? values : values + added->second);
    });
  };
  state::save_weights(all, infos_of(model.facts, /*frozen=*/false, plan::kPeftPrefix), visit,
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

namespace {

void load_values(parallel::DataParallel& engine, const state::StateReader& reader,
                 const plan::ModelConfig& model, const plan::ModelFacts& facts) {
  Lengths lengths;
  const state::TensorInfos adapters = infos_of(facts, /*frozen=*/false);
  if (model.adapter.kind == plan::AdapterKind::kDora)
    engine.visit_frozen([&](const std::string& name, const at::Tensor& values) {
      note_lengths(lengths, name, values, adapters, model);
    });
  engine.load_values([](const std::string&) { return true; },
                     [&](const std::string& name, const plan::Region& region, at::Tensor& out) {
                       at::Tensor values = reader.read(plan::kPeftPrefix + name, region).to(at::kFloat);
                       if (const auto base = lengths.find(name); base != lengths.end())
                         values = values - parallel::box_of(base->second, region)
                                               .reshape({-1})
                                               .narrow(0, region.range.begin, region.numel());
                       out.copy_(values);
                     });
}

}  // namespace

void load_adapter(comm::Group& all, const std::vector<std::shared_ptr<parallel::DataParallel>>& engines,
                  const plan::ModelConfig& model, const plan::ModelFacts& facts, const std::string& folder,
                  const std::string& base) {
  std::unique_ptr<state::StateReader> reader;
  const auto error = error_of([&] {
    const std::string path = folder + "/" + plan::kPeftWeights;
    const state::Notes notes = state::read_notes(path);
    if (const auto noted = notes.find(kBaseNote); noted != notes.end())
      check_base(noted->second, base, folder);
    reader = std::make_unique<state::StateReader>(path);
    for (const auto& [name, info] : infos_of(facts, /*frozen=*/false, plan::kPeftPrefix))
      reader->want(name, info.first, info.second);
    reader->check({}, /*ignores_optimizer=*/true);
  });
  comm::throw_together(all, error, "train.adapter");
  for (const auto& engine : engines) load_values(*engine, *reader, model, facts);
}

}  // namespace trireme::train
