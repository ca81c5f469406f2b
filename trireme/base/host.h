#pragma once
// Facts about this host: control groups, memory, boot, processor time.
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

/// Folders of the control groups that bound this process: its own and all around it, the outermost last,
/// first those of version 2 and then those of `controller` ("memory", "cpu") of version 1. A container may
/// see only the last of each. Files of the system are looked for under `root`.
std::vector<std::string> control_groups(const std::string& controller, const std::string& root = "");

/// Bytes that processes of this host may use together: memory and swap, or less where a control group of this
/// process says so.
int64_t host_memory(const std::string& root = "");

/// Differs from host to host and from boot to boot: processes that see the same share the monotonic clock.
/// Empty where the kernel does not tell.
std::string boot_id();

/// Processor time that a process of this host has used, all its threads together; 0 when it is gone. It
/// stands still while the process is stopped.
double processor_seconds(pid_t pid);

}  // namespace trireme
