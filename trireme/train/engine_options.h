#pragma once
// What a config means to the engine.
#include <c10/core/ScalarType.h>

#include <string>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/options.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// Of "fp32", "bf16" or "fp16".
at::ScalarType dtype_of(const std::string& name);

/// Throws ConfigError as plan::resolve_policy().
parallel::Options engine_options(const plan::Config& config, const comm::Mesh& mesh);

}  // namespace trireme::train
