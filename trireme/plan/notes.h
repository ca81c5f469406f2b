#pragma once
// What a config may say but hardly means.
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// A sentence each, for people, of a config as it was given; `device` is kCpu or kCuda.
std::vector<std::string> notes(const Config& config, Device device);

}  // namespace trireme::plan
