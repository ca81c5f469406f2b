#pragma once
// The host a run happened on, as its manifest records it and `doctor` shows it.
#include <cstdint>
#include <string>

namespace trireme::report {

struct Machine {
  std::string hostname;
  std::string cpu;           ///< model name; empty where the kernel does not tell
  int64_t cores = 1;         ///< that this process may use (affinity mask)
  int64_t memory_bytes = 0;  ///< physical memory of the host
  std::string kernel;        ///< "Linux 6.1.0"
};

Machine describe_machine();

}  // namespace trireme::report
