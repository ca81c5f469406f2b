#pragma once
// What a config's FP8 means to a model and a device.
#include <optional>

#include "trireme/comm/world.h"
#include "trireme/nn/fp8_history.h"
#include "trireme/parallel/options.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// How linear layers are multiplied; none: nothing is multiplied in FP8.
std::optional<nn::Fp8Recipe> recipe_of(const plan::Fp8Config& config);

/// The scales by which an engine that gathers matrices in FP8 casts them; `history` may be nullptr and must
/// outlive the engine.
parallel::Fp8Scales scales_of(const nn::Fp8History* history);

/// `config`, without FP8 where its shapes or this rank's device have none and precision.fp8_fallback is bf16,
/// which rank 0 warns about. Throws ConfigError for shapes and EnvironmentError for the device where it is
/// abort.
plan::Config settle_fp8(plan::Config config, const comm::World& world);

}  // namespace trireme::train
