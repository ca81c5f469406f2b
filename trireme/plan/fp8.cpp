#include "trireme/plan/fp8.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {

bool multiplies_in_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks) {
  const Fp8Skip& skip = fp8.skip;
  if (fp8.recipe == Fp8::kOff || (skip.first && block == 0) || (skip.last && block + 1 == blocks))
    return false;
  return std::ranges::find(skip.blocks, block) == skip.blocks.end();
}

bool gathers_fp8(const Fp8Config& fp8, int64_t block, int64_t blocks) {
  return fp8.gather && fp8.recipe == Fp8::kTensorwise && multiplies_in_fp8(fp8, block, blocks);
}

int64_t fp8_multiple(Fp8 recipe) {
  constexpr int64_t kBytes = 16, kBlock = 128;
  return recipe == Fp8::kBlockwise ? kBlock : kBytes;
}

std::string fp8_obstacle(const Config& config, const ModelFacts& facts, int64_t micro_batch) {
  const Fp8 recipe = config.precision.fp8.recipe;
  if (recipe == Fp8::kOff) return {};
  const int64_t multiple = fp8_multiple(recipe);
  for (const UnitSpec& unit : facts.units) {
    if (unit.name == kRootUnit || unit.name == kHeadUnit) continue;
    for (const ParamSpec& param : unit.params) {
      const auto fits = [multiple](int64_t size) { return size % multiple == 0; };
      const bool is_multiplied = param.shape.size() == 2 && !is_of_adapter(param.name);  // those in bf16
      if (!is_multiplied || std::ranges::all_of(param.shape, fits)) continue;
      return fmt::format(
          "{} is {}, but sizes must be multiples of {}; change model.d_model, model.n_heads, "
          "model.n_kv_heads or model.d_ff",
          param.name, fmt::join(param.shape, " x "), multiple);
    }
  }
  const int64_t contexts = facts.split.contexts, tokens = micro_batch * config.data.seq_len / contexts;
  if (tokens % multiple == 0) return {};
  return fmt::format(
      "a micro-batch has {} x {}{} = {} tokens on a rank, which must be a multiple of {}; change "
      "train.micro_batch or data.seq_len",
      micro_batch, config.data.seq_len, contexts > 1 ? fmt::format(" / {}", contexts) : "", tokens, multiple);
}

Config with_possible_fp8(Config config, Device device, const BatchPlan& batch) {
  Fp8Config& fp8 = config.precision.fp8;
  if (fp8.recipe == Fp8::kOff) return config;
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory,
                                    largest_split(config.parallel));
  std::string why = fp8_obstacle(config, facts, batch.micro_batch);
  const bool lacks_gpu = why.empty() && device == Device::kCpu && fp8.fallback != Fp8Fallback::kEmulate;
  if (lacks_gpu) why = "FP8 matrix multiplication needs a GPU; set precision.fp8 to off";
  if (why.empty()) return config;
  if (fp8.fallback != Fp8Fallback::kBf16) {
    throw ConfigError("[plan.fp8] precision.fp8={}: {}, or precision.fp8_fallback to bf16{}", fp8.recipe, why,
                      lacks_gpu ? ", or to emulate to compute the same numbers on the CPU" : "");
  }
  fp8.recipe = Fp8::kOff;
  return config;
}

}  // namespace trireme::plan
