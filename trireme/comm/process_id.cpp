#include "trireme/comm/process_id.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

bool shares_cores(pid_t pid) {
  cpu_set_t ours, theirs, both;
  if (::sched_getaffinity(0, sizeof ours, &ours) != 0) return true;
  if (::sched_getaffinity(pid, sizeof theirs, &theirs) != 0) return true;
  CPU_AND(&both, &ours, &theirs);
  return CPU_COUNT(&both) > 0;
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

int64_t processes_on_our_cores(const std::vector<ProcessId>& processes) {
  const std::string host = host_identity();
  return std::ranges::count_if(
      processes, [&](const ProcessId& process) { return process.host == host && shares_cores(process.pid); });
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
