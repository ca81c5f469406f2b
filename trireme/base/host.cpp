#include "trireme/base/host.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace trireme {
namespace {

/// Bytes that a file of a control group allows; none: as many as there are.
int64_t group_limit(const char* path) {
  int64_t bytes = 0;
  return std::ifstream(path) >> bytes ? bytes : std::numeric_limits<int64_t>::max();
}

}  // namespace

int64_t host_memory() {
  struct sysinfo info {};
  ::sysinfo(&info);
  const auto unit = static_cast<int64_t>(info.mem_unit);
  const int64_t memory = static_cast<int64_t>(info.totalram) * unit,
                swap = static_cast<int64_t>(info.totalswap) * unit;
  const int64_t both = std::min(memory, group_limit("/sys/fs/cgroup/memory.max")) +
                       std::min(swap, group_limit("/sys/fs/cgroup/memory.swap.max"));
  return std::min(both, group_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes"));  // version 1
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace trireme
