#pragma once
// What `doctor` looks at: each check is a row with a verdict, what was found, and the fix when it is not
// well.
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

/// Cores, memory, limits, disk, network and environment of this host.
std::vector<Check> check_machine(const Environment& environment, const std::string& runs_root, int gpus);

}  // namespace trireme::cli
