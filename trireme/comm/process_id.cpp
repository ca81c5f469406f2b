#include "trireme/comm/process_id.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace trireme::comm {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

ProcessId own_process() {
  return {.host = host_identity(), .pid = ::getpid(), .started = started_at(::getpid())};
}

std::string to_text(const ProcessId& process) {
  return fmt::format("{} {} {}", process.host.empty() ? "-" : process.host, process.pid, process.started);
}

ProcessId parse_process(const std::string& text) {
  ProcessId process;
  if (!(std::istringstream(text) >> process.host >> process.pid >> process.started)) return {};
  return process;
}

bool has_died(const ProcessId& process) {
  if (process.pid <= 0 || process.started == 0 || process.host != host_identity()) return false;
  return started_at(process.pid) != process.started;
}

std::string host_identity() {
  struct stat pids {};
  if (::stat("/proc/self/ns/pid", &pids) != 0) return {};
  return fmt::format("{}/{}/{}", first_line("/proc/sys/kernel/random/boot_id"), pids.st_ino, ::geteuid());
}

uint64_t started_at(pid_t pid) {
  const std::string line = first_line(fmt::format("/proc/{}/stat", pid));
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string state, skipped;
  fields >> state;
  if (state == "Z" || state == "X") return 0;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  uint64_t ticks = 0;
  fields >> ticks;
  return ticks;
}

}  // namespace trireme::comm
