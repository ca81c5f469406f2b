#include "trireme/base/cores.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <thread>

#include "trireme/base/host.h"

namespace trireme {
namespace {

int64_t cores_in_affinity_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(0, sizeof mask, &mask) == 0) return CPU_COUNT(&mask);
  return std::max<int64_t>(1, std::thread::hardware_concurrency());  // more cores than the mask has bits
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::optional<double> quota_of_cpu_max(std::string_view text) {
  int64_t quota_us = 0, period_us = 0;
  const char* end = text.data() + text.size();
  const auto [quota_end, quota_error] = std::from_chars(text.data(), end, quota_us);
  if (quota_error != std::errc() || quota_end == end || *quota_end != ' ') return std::nullopt;
  const auto [period_end, period_error] = std::from_chars(quota_end + 1, end, period_us);
  if (period_error != std::errc() || quota_us <= 0 || period_us <= 0) return std::nullopt;
  return static_cast<double>(quota_us) / static_cast<double>(period_us);
}

int64_t usable_cores(const std::string& root) {
  int64_t cores = cores_in_affinity_mask();
  for (const std::string& group : control_groups("cpu", root)) {
    // Version 1 has the two numbers in files of their own.
    const std::string older =
        first_line(group + "/cpu.cfs_quota_us") + " " + first_line(group + "/cpu.cfs_period_us");
    for (const std::string& text : {first_line(group + "/cpu.max"), older}) {
      if (const auto quota = quota_of_cpu_max(text)) cores = std::min(cores, static_cast<int64_t>(*quota));
    }
  }
  return std::max<int64_t>(1, cores);
}

}  // namespace trireme
