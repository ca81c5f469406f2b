#pragma once
// Keys that other trainers' files have, and what they are called here.
#include <string>
#include <vector>

#include "trireme/plan/config_internal.h"

namespace trireme::plan {

/// All such keys, sorted: "fsdp.sharding_strategy", ...
std::vector<std::string> alias_keys();

/// `given` in our own keys; itself where its key is none of the aliases.
std::vector<Assignment> in_our_keys(const Assignment& given);

}  // namespace trireme::plan
