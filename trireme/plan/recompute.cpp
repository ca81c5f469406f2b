#include "trireme/plan/recompute.h"

#include <limits>
#include <vector>

#include "trireme/plan/adapter.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {
namespace {

/// FLOPs of a step of llama-1b on an H200 in the time in which a copy moves a byte: 560 TFLOP/s beside 4.3
/// TB/s.
constexpr double kFlopsPerByte = 130.0;
constexpr double kNoticed = 0.01;

double repeated_flops_of_images(const ModelFacts& facts) {
  double flops = 0.0;
  for (const UnitSpec& unit : facts.units) flops += unit.image.computed_again ? unit.image.flops : 0.0;
  return flops;
}

/// Nothing reads the output of the last product of a block with attention when it is computed again, unless
/// dropout follows, or the gradient of a length does.
double unread_flops(const UnitSpec& block, const ModelConfig& model) {
  const ModelFamilyRecord& family = record_of(model.family);
  if (!family.attends || (family.drops && model.dropout > 0.0) || reads_last_product(block)) return 0.0;
  double flops = 0.0;
  for (const ParamSpec& param : block.params) {
    if (param.layer == BlockLayer::kFeedForwardOut && param.shape.size() == 2)
      flops += 2.0 * static_cast<double>(param.numel());
  }
  return flops;
}

}  // namespace

double cheap_cost(const Config& config) {
  const ModelConfig& model = config.model;
  const ModelFamilyRecord& family = record_of(model.family);
  if (family.cheap_bytes == nullptr) return std::numeric_limits<double>::infinity();
  const int64_t element = bytes_of(config.precision.compute);
  // Outputs of norms and activations are written again, and for the norms the residual stream is read, twice;
  // backward reads the inputs of activations anyway.
  const int64_t moved = family.cheap_bytes(model, element) + 2 * element * model.d_model;
  const double flops = describe(model, config.data.seq_len).flops_per_token;
  const double layers =
      static_cast<double>(model.n_layers) / static_cast<double>(config.memory.recompute_every);
  return static_cast<double>(moved) * layers * kFlopsPerByte / flops;
}

double repeated_flops(const Config& config) {
  if (!computes_blocks_again(config.memory.recompute)) return 0.0;
  const ModelConfig model = complete(config.model, config.data.seq_len);
  const ModelFacts facts = describe(model, config.data.seq_len, config.precision, config.memory);
  if (reads_images(model.family)) return repeated_flops_of_images(facts);
  const std::vector<StagePart> blocks = stage_parts(model, facts);
  const bool keeps_attention = config.memory.recompute == Recompute::kAllButAttention;
  double flops = 0.0;
  for (int64_t layer = 0; layer < model.n_layers; layer += config.memory.recompute_every) {
    const StagePart& block = blocks[static_cast<size_t>(layer)];
    flops += block.flops - (keeps_attention ? block.attention : 0.0) -
             unread_flops(facts.units[static_cast<size_t>(1 + layer)], model);
  }
  return flops;
}

Config settle_recompute(Config config, Device device) {
  Recompute& recompute = config.memory.recompute;
  if (recompute != Recompute::kAuto) return config;
  // Products in FP8 are shorter, and their inputs take a byte an element as they are. Of dropout's output
  // nothing is cheap.
  const bool can = config.precision.fp8.recipe == Fp8::kOff && config.model.adapter.dropout == 0.0;
  const bool pays = device == Device::kCuda && can && cheap_cost(config) < kNoticed;
  recompute = pays ? Recompute::kCheap : Recompute::kNone;
  return config;
}

}  // namespace trireme::plan
