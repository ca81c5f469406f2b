#include "trireme/kernels/device.h"

#include <fstream>

namespace trireme::kernels {

int64_t resident_peak() {
  // Not getrusage(): its peak survives exec, so it would be that of whoever started this process.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

double bf16_peak_flops(const std::string& gpu_name) {
  for (const char* hopper : {"H100", "H200", "GH200"}) {
    if (gpu_name.find(hopper) != std::string::npos) return 989.4e12;
  }
  if (gpu_name.find("A100") != std::string::npos) return 312e12;
  return 0.0;
}

}  // namespace trireme::kernels
