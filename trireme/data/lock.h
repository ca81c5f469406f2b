#pragma once
// One process at a time: an flock on a file of its own, given back by the kernel when the holder dies.
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "trireme/base/descriptor.h"

namespace trireme::data {

/// Holds the lock until destroyed. The file stays, for removing it would let two holders in.
class FileLock {
 public:
  /// Waits while the holder shows signs of life, and logs for whom when it takes long. While it waits it
  /// calls `while_waiting` 50 times a second, with `alive` true when the holder has shown a sign of life
  /// since the last call; what that throws ends the wait. Throws EnvironmentError naming the holder's process
  /// id after `timeout_s` without a sign of life, or when the file cannot be created.
  FileLock(
      const std::string& path, double timeout_s,
      const std::function<void(bool alive)>& while_waiting = [](bool) {});

  /// The lock if nobody holds it. Throws EnvironmentError when the file cannot be created.
  static std::optional<FileLock> try_take(const std::string& path);

  /// A sign of life for those who wait; cheap when called often.
  void show_life();

 private:
  explicit FileLock(Descriptor file) : file_(std::move(file)) {}

  Descriptor file_;
  double shown_at_ = 0.0;
};

}  // namespace trireme::data
