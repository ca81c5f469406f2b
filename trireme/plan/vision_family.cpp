// Checks on the config of models of images; plan/vision_model.cpp describes them.
#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/family_parts.h"

namespace trireme::plan {
namespace {

void check_stages(const Config& config, const Origins& origins) {
  const auto two_ways = said_two_ways(config, origins);
  const bool has_statistics =
      config.model.family == ModelFamily::kResNet && config.model.vision.norm != ImageNorm::kGroup;
  if (two_ways && has_statistics) {
    throw ConfigError(
        "[plan.config] {} with {}: two ranks would have a copy of each norm, with running statistics of half "
        "of the micro-batches; take a schedule of stages that go one way, such as dualpipe_v, or set "
        "model.norm=group",
        *two_ways, said(origins, "model.norm", config.model.vision.norm));
  }
}

void check_images(const Config& config, const Origins& origins) {
  if (config.pipeline.spread_head) {
    throw ConfigError(
        "[plan.config] {} with {}, whose head is small and cannot be spread; set pipeline.spread_head to "
        "false",
        said(origins, "pipeline.spread_head", true), said(origins, "model.family", config.model.family));
  }
  if (config.parallel.pp > 1) check_stages(config, origins);
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
