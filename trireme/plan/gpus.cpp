#include "trireme/plan/gpus.h"

#include <charconv>
#include <string_view>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

/// MiB as nvidia-smi lists them, which is less than the round number of the name.
struct Gpu {
  std::string_view name;
  int64_t mib;
};
constexpr Gpu kGpus[] = {{"a100", 81920},    {"a100-40gb", 40960}, {"a10g", 23028},    {"b200", 183359},
                         {"h100", 81559},    {"h200", 143771},     {"l4", 23034},      {"l40s", 46068},
                         {"rtx3090", 24576}, {"rtx4090", 24564},   {"rtx5090", 32607}, {"rtx6000ada", 49140}};

}  // namespace

std::string gpu_choices() {
  std::vector<std::string> names;
  for (const Gpu& gpu : kGpus) names.emplace_back(gpu.name);
  return join(names, ", ") + ", or GiB of memory";
}

int64_t gpu_bytes(const std::string& kind) {
  for (const Gpu& gpu : kGpus) {
    if (gpu.name == kind) return gpu.mib << 20;
  }
  constexpr double kMost = 4096.0;
  double gib = 0.0;
  const char* const end = kind.data() + kind.size();
  const auto [rest, error] = std::from_chars(kind.data(), end, gib);
  if (error == std::errc() && rest == end && gib > 0.0 && gib <= kMost)
    return static_cast<int64_t>(gib * static_cast<double>(int64_t{1} << 30));
  throw ConfigError("[plan.gpus] '{}' is no GPU that is known; give one of {}", kind, gpu_choices());
}

}  // namespace trireme::plan
