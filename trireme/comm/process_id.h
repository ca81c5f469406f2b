#pragma once
// Which process a rank is, so that ranks of the same host can see whether it still runs. Internal to this
// room.
#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::comm {

struct ProcessId {
  std::string host;  ///< host_identity() there
  pid_t pid = 0;
  uint64_t started = 0;  ///< tells the process from a later one with its pid
};

ProcessId own_process();

/// "host pid started" and back. Any other text gives a process without a host, which never counts as dead.
std::string to_text(const ProcessId& process);
ProcessId parse_process(const std::string& text);

/// Whether the process has ended; false for a process of another host, of which nothing is known here.
bool has_died(const ProcessId& process);

/// How many of `processes`, this one among them, may run on cores of this one: those of this host whose
/// affinity mask has a core of ours, or of which nothing is known.
int64_t processes_on_our_cores(const std::vector<ProcessId>& processes);

/// Equal for processes that see each other's pids and can open each other's descriptors and memory.
std::string host_identity();

/// When the process was started, in clock ticks since boot; 0 when it is gone or a zombie.
uint64_t started_at(pid_t pid);

}  // namespace trireme::comm
