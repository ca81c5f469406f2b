#include "trireme/kernels/device.h"

#include <sys/resource.h>

namespace trireme::kernels {

int64_t resident_peak() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;
}

double bf16_peak_flops(const std::string& gpu_name) {
  for (const char* hopper : {"H100", "H200", "GH200"}) {
    if (gpu_name.find(hopper) != std::string::npos) return 989.4e12;
  }
  if (gpu_name.find("A100") != std::string::npos) return 312e12;
  return 0.0;
}

}  // namespace trireme::kernels
