#pragma once
// Whether all ranks are about to run the same thing. Hosts are given their configs apart from each other: by
// files, variables and arguments of their own.
#include "trireme/comm/world.h"
#include "trireme/plan/config.h"

namespace trireme::train {

/// Throws ConfigError on every rank alike when ranks have different values of keys that decide what is
/// computed, naming the keys with both values. Collective.
void check_same_config(const plan::Config& config, comm::World& world);

}  // namespace trireme::train
