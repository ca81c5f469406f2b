#pragma once
// A file that one process at a time holds locked, with the number of that process in it for people to read.
#include <optional>
#include <string>
#include <utility>

#include "trireme/base/descriptor.h"

namespace trireme {

/// While it lives, this process holds the file. Its end puts back what the file said before, so whoever locks
/// it and then refuses to go on has changed nothing, and a number in a file that nobody holds is that of a
/// process that was killed.
class LockFile {
 public:
  /// Makes the file at `path` where there is none, locks it and writes the number of this process into it;
  /// none: another process has locked it. Where the file system has no locks there is nothing to hold, and
  /// everybody gets one. Throws EnvironmentError when the file cannot be opened.
  static std::optional<LockFile> take(const std::string& path);

  /// The number of the process that has locked the file at `path`; none: it is free.
  static std::optional<std::string> holder(const std::string& path);
  /// The number in the file at `path`, held or not; empty: there is none, or no such file.
  static std::string number_in(const std::string& path);

  LockFile(LockFile&&) noexcept = default;
  LockFile& operator=(LockFile&&) = delete;
  ~LockFile();

 private:
  LockFile(Descriptor file, std::string before) : file_(std::move(file)), before_(std::move(before)) {}

  Descriptor file_;
  std::string before_;
};

}  // namespace trireme
