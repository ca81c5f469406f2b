#include "trireme/report/machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <string_view>

namespace trireme::report {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t value = line.find(": ");
    return value == std::string::npos ? "" : line.substr(value + 2);
  }
  return "";
}

int64_t usable_cores() {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return CPU_COUNT(&mask);
  return sysconf(_SC_NPROCESSORS_ONLN);  // more cores than the fixed mask can hold
}

}  // namespace

Machine describe_machine() {
  utsname names{};
  uname(&names);
  return {.hostname = names.nodename,
          .cpu = cpu_model(),
          .cores = usable_cores(),
          .memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE),
          .kernel = std::string(names.sysname) + " " + names.release};
}

}  // namespace trireme::report
