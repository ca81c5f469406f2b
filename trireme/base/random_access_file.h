#pragma once
// Pieces of a file that stays on disk.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "trireme/base/descriptor.h"

namespace trireme {

/// A file of which pieces are read. Unlike pages of a map they are no memory of the process, and a file that
/// becomes shorter is an error, not a signal. Movable; const functions may be called by several threads.
class RandomAccessFile {
 public:
  /// Throws EnvironmentError when the file cannot be opened.
  explicit RandomAccessFile(std::string path);

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  ///< bytes, when it was opened
  /// Fills `out` from `offset` on. Throws DataError where the file ends before that, EnvironmentError where
  /// it cannot be read.
  void read(int64_t offset, std::span<std::byte> out) const;

 private:
  std::string path_;
  Descriptor file_;
  int64_t size_ = 0;
};

}  // namespace trireme
