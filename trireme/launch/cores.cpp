#include "trireme/launch/cores.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace trireme::launch {
namespace {

constexpr const char* kCgroupRoot = "/sys/fs/cgroup";

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

/// The path of our cgroup in the v2 hierarchy: "/" or "/user.slice/...". Empty under v1.
std::string own_cgroup() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("0::")) return line.substr(3);
  }
  return {};
}

/// "/a/b" -> "/a/b", "/a", "": inside a container the last one, the mount itself, may be the one with a
/// quota.
std::vector<std::string> self_and_ancestors(std::string group) {
  std::vector<std::string> groups{group};
  while (!group.empty()) {
    group.resize(group.rfind('/'));
    groups.push_back(group);
  }
  return groups;
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

int64_t usable_cores() {
  int64_t cores = cores_in_affinity_mask();
  for (const std::string& group : self_and_ancestors(own_cgroup())) {
    const auto quota = quota_of_cpu_max(first_line(kCgroupRoot + group + "/cpu.max"));
    if (quota) cores = std::min(cores, static_cast<int64_t>(*quota));
  }
  return std::max<int64_t>(1, cores);
}

}  // namespace trireme::launch
