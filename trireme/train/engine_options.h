#pragma once
// What a config means to the engine.
#include <c10/core/ScalarType.h>

#include "trireme/comm/mesh.h"
#include "trireme/nn/fp8_history.h"
#include "trireme/parallel/options.h"
#include "trireme/plan/config.h"

namespace trireme::train {

at::ScalarType dtype_of(plan::Dtype dtype);

/// `history`: that of delayed scales of FP8, which must outlive the engine; nullptr: none. Throws ConfigError
/// as plan::resolve_policy().
parallel::Options engine_options(const plan::Config& config, const comm::Mesh& mesh,
                                 const nn::Fp8History* history = nullptr);

}  // namespace trireme::train
