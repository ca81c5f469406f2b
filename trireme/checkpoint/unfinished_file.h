#pragma once
// A file that has its name only once it is complete. Until then its bytes are in a file beside it, which no
// other writer of that name uses or removes.
#include <cstdint>
#include <string>

#include "trireme/base/descriptor.h"

namespace trireme::checkpoint {

/// Throws EnvironmentError where the disk fails.
class UnfinishedFile {
 public:
  /// Creates the file beside `path`, under a name that no other writer has, and removes what writers of
  /// `path` that were killed have left there.
  explicit UnfinishedFile(std::string path);
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;
  /// Removes the file, unless finish() has given it its name.
  ~UnfinishedFile();

  void resize(int64_t bytes);
  void write(int64_t offset, const void* data, int64_t bytes);
  /// What was written is on the disk under `path` when this returns; what was there before is gone.
  void finish();
  bool is_finished() const { return !file_; }

 private:
  bool is_mine() const;

  std::string path_, temporary_;
  Descriptor file_;
};

}  // namespace trireme::checkpoint
