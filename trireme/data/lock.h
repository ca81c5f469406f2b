#pragma once
// One process at a time: an flock on a file of its own, given back by the kernel when the holder dies.
#include <string>

#include "trireme/data/posix.h"

namespace trireme::data {

/// Holds the lock until destroyed. The file stays, for removing it would let two holders in.
class FileLock {
 public:
  /// Waits up to `timeout_s` and says whom it waits for. Throws EnvironmentError naming the holder's process
  /// id when the time is over, or when the file cannot be created.
  FileLock(const std::string& path, double timeout_s);

 private:
  Descriptor file_;
};

}  // namespace trireme::data
