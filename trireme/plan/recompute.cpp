#include "trireme/plan/recompute.h"

#include <limits>

#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

/// FLOPs of a step of llama-1b on an H200 in the time in which a copy moves a byte: 560 TFLOP/s beside 4.3
/// TB/s.
constexpr double kFlopsPerByte = 130.0;
constexpr double kNoticed = 0.01;

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

Config settle_recompute(Config config, Device device) {
  Recompute& recompute = config.memory.recompute;
  if (recompute != Recompute::kAuto) return config;
  // Products in FP8 are shorter, and their inputs take a byte an element as they are.
  const bool pays =
      device == Device::kCuda && config.precision.fp8.recipe == Fp8::kOff && cheap_cost(config) < kNoticed;
  recompute = pays ? Recompute::kCheap : Recompute::kNone;
  return config;
}

}  // namespace trireme::plan
