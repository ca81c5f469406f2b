#include "trireme/base/host.h"

#include <sys/sysinfo.h>
#include <ctime>

#include <algorithm>
#include <fstream>
#include <limits>

#include "trireme/base/text.h"

namespace trireme {
namespace {

/// Bytes that files of this name allow in the tightest of the groups; none: as many as there are.
int64_t tightest(const std::vector<std::string>& groups, const std::string& name) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const std::string& group : groups) {
    int64_t bytes = 0;
    if (std::ifstream(group + "/" + name) >> bytes) least = std::min(least, bytes);
  }
  return least;
}

/// "/a/b" as "/a/b", "/a" and "" below `mount`.
void add_self_and_ancestors(const std::string& mount, std::string group, std::vector<std::string>& folders) {
  for (;;) {
    folders.push_back(mount + group);
    if (group.empty()) return;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

std::vector<std::string> control_groups(const std::string& controller, const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::vector<std::string> folders, older;
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "0::/a/b", "4:cpu,cpuacct:/a/b"
    const size_t names = line.find(':'), path = line.find(":/");
    if (path == std::string::npos || path < names) continue;
    const std::string group = line.substr(path + 1);
    if (path == names + 1) {
      add_self_and_ancestors(mount, group, folders);
    } else if (std::ranges::count(split(line.substr(names + 1, path - names - 1), ','), controller) > 0) {
      add_self_and_ancestors(mount + "/" + controller, group, older);
    }
  }
  folders.insert(folders.end(), older.begin(), older.end());
  return folders;
}

int64_t host_memory(const std::string& root) {
  struct sysinfo info {};
  ::sysinfo(&info);
  const auto unit = static_cast<int64_t>(info.mem_unit);
  const int64_t memory = static_cast<int64_t>(info.totalram) * unit,
                swap = static_cast<int64_t>(info.totalswap) * unit;
  const std::vector<std::string> groups = control_groups("memory", root);
  const int64_t both =
      std::min(memory, tightest(groups, "memory.max")) + std::min(swap, tightest(groups, "memory.swap.max"));
  return std::min(both, tightest(groups, "memory.limit_in_bytes"));  // version 1
}

std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

double processor_seconds(pid_t pid) {
  clockid_t clock = 0;
  timespec used{};
  if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &used) != 0) return 0.0;
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

}  // namespace trireme
