// What a config asks of models of images; plan/vision_model.cpp describes them.
#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/family_parts.h"

namespace trireme::plan {
namespace {

void check_images(const Config& config, const Origins& origins) {
  if (config.parallel.pp > 1) {
    throw ConfigError(
        "[plan.config] {}, but {} reads images, and only text models can be cut into stages; set parallel.pp "
        "to 1",
        said(origins, "parallel.pp", config.parallel.pp), said(origins, "model.family", config.model.family));
  }
  if (config.train.sample_tokens > 0) {
    throw ConfigError(
        "[plan.config] {}, but {} reads images and generates no text; set train.sample_tokens to 0",
        said(origins, "train.sample_tokens", config.train.sample_tokens),
        said(origins, "model.family", config.model.family));
  }
}

constexpr ModelFamilyRecord record_of_images(ModelFamily family) {
  return {.family = family,
          .attends = false,
          .drops = false,
          .embeddings = nullptr,
          .block = nullptr,
          .attention_params = 0,
          .final_norm = nullptr,
          .linears = nullptr,
          .saved_bytes = nullptr,
          .cheap_bytes = nullptr,
          .check = check_images};
}

}  // namespace

const ModelFamilyRecord kResNetRecord = record_of_images(ModelFamily::kResNet);
const ModelFamilyRecord kLeNetRecord = record_of_images(ModelFamily::kLeNet);

}  // namespace trireme::plan
