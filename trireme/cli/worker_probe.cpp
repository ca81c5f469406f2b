#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/build_info.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/kernels/device.h"

namespace trireme::cli {
namespace {

/// Paths of the shared libraries of interest that this process has loaded.
std::set<std::string> loaded_libraries() {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    for (const char* wanted : {"libtorch", "libc10", "libcudart", "libnccl", "libcudnn.", "libcublas."}) {
      if (line.find(wanted, slash) != std::string::npos) paths.insert(line.substr(slash));
    }
  }
  return paths;
}

}  // namespace

int worker_probe() {
  nlohmann::json devices = nlohmann::json::array();
  for (const kernels::GpuInfo& gpu : kernels::gpus()) {
    devices.push_back({{"name", gpu.name},
                       {"capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
                       {"memory_bytes", gpu.memory_bytes}});
  }
  const nlohmann::json result = {
      {"schema", "trireme.probe/1"},      {"torch", TORCH_VERSION},
      {"cuda_built", kHasCuda},           {"cuda_devices", devices},
      {"nccl", kernels::nccl_version()},  {"gloo", true},
      {"threads", at::get_num_threads()}, {"cpu_capability", at::get_cpu_capability()},
      {"libraries", loaded_libraries()}};
  std::cout << result.dump() << "\n";
  return 0;
}

}  // namespace trireme::cli
