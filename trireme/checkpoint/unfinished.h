#pragma once
// Files and folders that have their names only once they are complete. Until then they are beside that name,
// under one that no other writer uses or removes.
#include <cstdint>
#include <string>

#include "trireme/base/descriptor.h"
#include "trireme/checkpoint/folder.h"

namespace trireme::checkpoint {

/// The place of something unfinished. Its writer holds a lock on it, which the kernel gives back when the
/// writer dies, so that the next writer of the same name knows what was left and removes it.
class Unfinished {
 public:
  enum class Kind { kFile, kFolder };
  /// Makes a file or folder ".NAME.PROCESS-N.trireme-tmp" beside `path`, and removes what writers of `path`
  /// that were killed have left there. Throws EnvironmentError where the disk fails.
  Unfinished(const std::string& path, Kind kind);
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  /// remove(), unless keep() was called.
  ~Unfinished();

  const std::string& path() const { return temporary_; }
  int descriptor() const { return opened_.get(); }
  /// Whether neither keep() nor remove() was called.
  bool is_there() const { return static_cast<bool>(opened_); }
  /// Gives up the ownership of a file that has another name by now.
  void keep() { opened_.close(); }
  /// Removes it with all that is in it, as far as the disk lets it.
  void remove();

 private:
  bool is_mine() const;

  std::string temporary_;
  Descriptor opened_;
};

/// A file that has its name once finish() has returned. Throws EnvironmentError where the disk fails.
class UnfinishedFile {
 public:
  explicit UnfinishedFile(const std::string& path);

  void resize(int64_t bytes);
  void write(int64_t offset, const void* data, int64_t bytes);
  /// For bytes that come one after the other, in place of write().
  OutputFile output() const;
  /// When this returns, the bytes written are on the disk under `path`, in place of an earlier file.
  void finish();
  bool is_finished() const { return !unfinished_.is_there(); }

 private:
  std::string path_;
  Unfinished unfinished_;
};

}  // namespace trireme::checkpoint
