#pragma once
// What a config means to the engine.
#include <c10/core/ScalarType.h>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/options.h"
#include "trireme/plan/config.h"

namespace trireme::train {

at::ScalarType dtype_of(plan::Dtype dtype);

/// Throws ConfigError as plan::resolve_policy().
parallel::Options engine_options(const plan::Config& config, const comm::Mesh& mesh);

}  // namespace trireme::train
