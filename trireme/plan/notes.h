#pragma once
// Notes on settings that are allowed but hardly meant.
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// Notes for people on a config as it was given, a sentence each; `device` is kCpu or kCuda.
std::vector<std::string> notes(const Config& config, Device device);

}  // namespace trireme::plan
