#pragma once
// GPUs by name, for plans of machines that are elsewhere.
#include <cstdint>
#include <string>

namespace trireme::plan {

/// Bytes that the driver reports as the memory of one GPU of this kind ("h100", "l40s", ...), or of as many
/// GiB as a plain number says ("80"). Throws ConfigError that lists the names.
int64_t gpu_bytes(const std::string& kind);

/// "h100, h200, ... or GiB of memory".
std::string gpu_choices();

}  // namespace trireme::plan
