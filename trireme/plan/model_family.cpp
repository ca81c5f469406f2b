#include "trireme/plan/model_family.h"

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
