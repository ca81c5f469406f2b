#pragma once
// Who may write the manifest of a run directory: one process at a time, from before its first change until it
// ends. A run that saves checkpoints holds the lock of those as well, which ranks of any launcher take.
#include <optional>
#include <string>
#include <utility>

#include "trireme/base/descriptor.h"

namespace trireme::report {

class RunLock {
 public:
  /// Makes the file at `path` where there is none, locks it and writes the number of this process into it;
  /// none: another process has locked it. Where the file system has no locks there is nothing to hold, and
  /// everybody gets one. Throws EnvironmentError when the file cannot be opened.
  static std::optional<RunLock> take(const std::string& path);

  /// What is written in the file at `path`, the number of a process, while a process has locked it; none: it
  /// is free.
  static std::optional<std::string> holder(const std::string& path);

 private:
  explicit RunLock(Descriptor file) : file_(std::move(file)) {}

  Descriptor file_;
};

}  // namespace trireme::report
