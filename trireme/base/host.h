#pragma once
// What this host has.
#include <cstdint>
#include <string>

namespace trireme {

/// Bytes that processes of this host may use together: memory and swap, or less where a control group says
/// so.
int64_t host_memory();

/// Differs from host to host and from boot to boot: processes that see the same share the monotonic clock.
/// Empty where the kernel does not tell.
std::string boot_id();

}  // namespace trireme
