#pragma once
// Helpers of this room's writers: errors, syncs by path, and folders that are there complete or not at all.
#include <string>
#include <string_view>

namespace trireme::data {

/// Throws EnvironmentError "cannot <action> <path>: <text of errno>".
[[noreturn]] void throw_errno(std::string_view action, const std::string& path, int error);

/// fsync of a file or folder. Throws EnvironmentError.
void sync_path(const std::string& path);

/// Removes a folder with all that is in it, as far as it is there. Throws EnvironmentError.
void remove_folder(const std::string& path);

/// A folder that is gone at the end of the scope unless it got its final name. Throws EnvironmentError.
class TemporaryFolder {
 public:
  /// Makes it, empty: what a process that died has left at `path` is removed.
  explicit TemporaryFolder(std::string path);
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::string& path() const { return path_; }
  /// Gives it its final name, in place of what has it now; the files in it are synced by whoever wrote them.
  /// Name and contents survive a power cut once this returns.
  void commit(const std::string& final_path);

 private:
  std::string path_;
};

}  // namespace trireme::data
