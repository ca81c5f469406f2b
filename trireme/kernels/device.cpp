#include "trireme/kernels/device.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <fstream>
#include <limits>

namespace trireme::kernels {

int64_t resident_peak() {
  // Not getrusage(): its peak survives exec, so it would be that of whoever started this process.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

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
  return std::min(memory, group_limit("/sys/fs/cgroup/memory.max")) +
         std::min(swap, group_limit("/sys/fs/cgroup/memory.swap.max"));
}

double bf16_peak_flops(const std::string& gpu_name) {
  for (const char* hopper : {"H100", "H200", "GH200"}) {
    if (gpu_name.find(hopper) != std::string::npos) return 989.4e12;
  }
  if (gpu_name.find("A100") != std::string::npos) return 312e12;
  return 0.0;
}

}  // namespace trireme::kernels
