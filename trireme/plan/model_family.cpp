#include "trireme/plan/model_family.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "trireme/base/error.h"
#include "trireme/plan/family_parts.h"

namespace trireme::plan {
namespace {

constexpr const ModelFamilyRecord* kRecords[] = {&kGpt2Record, &kLlamaRecord, &kMlpRecord, &kResNetRecord,
                                                 &kLeNetRecord};
static_assert(std::size(kRecords) == kNames<ModelFamily>.size());

double deviation_of(const ModelConfig& model) {
  return std::sqrt(2.0 / (5.0 * static_cast<double>(model.d_model)));
}

}  // namespace

const ModelFamilyRecord& record_of(ModelFamily family) {
  for (const ModelFamilyRecord* record : kRecords) {
    if (record->family == family) return *record;
  }
  throw LogicError("[plan.model_family] family {} has no record", static_cast<int>(family));
}

const ParamSpec* head_weight(const std::vector<UnitSpec>& units, const ModelConfig& model) {
  const ModelFamilyRecord& family = record_of(model.family);
  const auto named = [](const UnitSpec& unit, const std::string& name) {
    const auto found = std::ranges::find(unit.params, name, &ParamSpec::name);
    return found == unit.params.end() ? nullptr : &*found;
  };
  const auto head =
      std::ranges::find_if(units, [](const UnitSpec& unit) { return unit.name.starts_with(kHeadUnit); });
  if (head != units.end()) {
    const auto weight =
        std::ranges::find_if(head->params, [](const ParamSpec& param) { return param.shape.size() == 2; });
    return weight == head->params.end() ? nullptr : &*weight;
  }
  const bool has_norm = named(units.front(), family.final_norm(model).front().name) != nullptr;
  return has_norm ? named(units.front(), family.embeddings(model).front().name) : nullptr;
}

std::vector<ModelFamily> language_families() {
  std::vector<ModelFamily> families;
  for (const ModelFamily family : all_values<ModelFamily>()) {
    if (!reads_images(family)) families.push_back(family);
  }
  return families;
}

ParamSpec matrix(const ModelConfig& model, std::string name, std::vector<int64_t> shape,
                 std::optional<BlockLayer> layer) {
  return {.name = std::move(name),
          .shape = std::move(shape),
          .initial = {.deviation = deviation_of(model)},
          .layer = layer};
}

ParamSpec residual_matrix(const ModelConfig& model, std::string name, std::vector<int64_t> shape,
                          BlockLayer layer) {
  ParamSpec spec = matrix(model, std::move(name), std::move(shape), layer);
  spec.initial.deviation /= std::sqrt(2.0 * static_cast<double>(model.n_layers));
  return spec;
}

ParamSpec ones(std::string name, int64_t size) {
  return {std::move(name), {size}, {.mean = 1.0}};
}

ParamSpec zeros(std::string name, int64_t size) {
  return {std::move(name), {size}};
}

}  // namespace trireme::plan
