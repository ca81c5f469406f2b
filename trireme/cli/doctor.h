#pragma once
// The checks of `doctor`: each is a row with a verdict, what was found, and the fix when it is not well.
#include <string>
#include <vector>

#include "trireme/base/env.h"

namespace trireme::cli {

enum class Verdict { kOk, kWarn, kFail };

struct Check {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string found;
  std::string fix;  ///< empty when all is well
};

/// The worker, its libraries, and its devices against the `gpus` that the driver shows. Runs the worker.
std::vector<Check> check_worker(const Environment& environment, int gpus);

/// Facts of the host on which the effect of NCCL's variables depends.
struct HostNetwork {
  int gpus = 0;
  std::vector<std::string> interfaces,
      infiniband;  ///< names of network interfaces, and of InfiniBand adapters
};
HostNetwork describe_network(int gpus);

/// A row for each variable of NCCL and torch.distributed that is set: what it does on such a host.
std::vector<Check> check_variables(const Environment& environment, const HostNetwork& host);

/// Cores, memory, limits, disk, network and environment of this host.
std::vector<Check> check_machine(const Environment& environment, const std::string& runs_root, int gpus);

}  // namespace trireme::cli
