#include "trireme/train/fp8.h"

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::train {
namespace {

kernels::Fp8Scaling scaling_of(plan::Fp8 recipe) {
  switch (recipe) {
    case plan::Fp8::kRowwise:
      return kernels::Fp8Scaling::kRow;
    case plan::Fp8::kBlockwise:
      return kernels::Fp8Scaling::kBlock;
    case plan::Fp8::kTensorwise:
    case plan::Fp8::kOff:
      break;
  }
  return kernels::Fp8Scaling::kTensor;
}

}  // namespace

std::optional<nn::Fp8Recipe> recipe_of(const plan::Fp8Config& config) {
  if (config.recipe == plan::Fp8::kOff) return {};
  const bool e5m2 = config.gradients == plan::Fp8Gradients::kE5m2;
  return nn::Fp8Recipe{.scaling = scaling_of(config.recipe),
                       .gradients = e5m2 ? kernels::Fp8Format::kE5m2 : kernels::Fp8Format::kE4m3,
                       .fast_forward = config.fast != plan::Fp8Fast::kNone,
                       .fast_backward = config.fast == plan::Fp8Fast::kAll};
}

parallel::Fp8Scales scales_of(const nn::Fp8History* history) {
  if (history == nullptr) return {};
  return [history](int64_t block, plan::BlockLayer layer) {
    return history->of_block({}, block).layer.at(layer);
  };
}

plan::Config settle_fp8(plan::Config config, const comm::World& world) {
  plan::Fp8Config& fp8 = config.precision.fp8;
  if (fp8.recipe == plan::Fp8::kOff) return config;
  const plan::BatchPlan batch = plan::plan_batch(config, plan::MeshShape::fit(config.parallel, world.size()));
  const plan::ModelFacts facts = plan::describe(config.model, config.data.seq_len, config.precision,
                                                config.memory, plan::largest_split(config.parallel));
  const std::string shape = plan::fp8_obstacle(config, facts, batch.micro_batch);
  const bool emulates = fp8.fallback == plan::Fp8Fallback::kEmulate && !world.device().is_cuda();
  const std::string lack =
      emulates ? std::string() : kernels::fp8_lack(world.device(), scaling_of(fp8.recipe));
  if (emulates && world.rank() == 0) {
    log_warning("precision.fp8={} on a CPU: products are computed in fp32 from FP8 values", fp8.recipe);
  }
  if (shape.empty() && lack.empty()) return config;
  const std::string what =
      fmt::format("[train.fp8] precision.fp8={} on {}", fp8.recipe, world.device().str());
  if (fp8.fallback == plan::Fp8Fallback::kBf16) {
    if (world.rank() == 0)
      log_warning("{}: {}; training continues in bf16", what, shape.empty() ? lack : shape);
    fp8.recipe = plan::Fp8::kOff;
    return config;
  }
  if (!shape.empty()) throw ConfigError("{}: {}, or precision.fp8_fallback to bf16", what, shape);
  throw EnvironmentError(
      "{}: {}; set precision.fp8 to off, or precision.fp8_fallback to bf16 to continue in bf16{}", what, lack,
      world.device().is_cuda() ? "" : ", or to emulate to compute the same numbers on a CPU");
}

}  // namespace trireme::train
