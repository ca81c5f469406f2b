#pragma once
// How many cores this process may really use: its affinity mask and the CPU quota of its container.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace trireme {

/// The quota in cores of a cgroup-v2 file cpu.max ("150000 100000" is 1.5), or nothing for "max" and
/// unreadable text.
std::optional<double> quota_of_cpu_max(std::string_view text);

/// Cores in the affinity mask, bounded by the tightest quota of our control groups; at least 1. Files of the
/// system are looked for under `root`.
int64_t usable_cores(const std::string& root = "");

}  // namespace trireme
