#pragma once
// What this host has.
#include <cstdint>

namespace trireme {

/// Bytes that processes of this host may use together: memory and swap, or less where a control group says
/// so.
int64_t host_memory();

}  // namespace trireme
