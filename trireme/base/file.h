#pragma once
// Files with errors that name the path and the cause: read-only maps, whole-file reads, writes that are
// complete or absent.
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "trireme/base/descriptor.h"

namespace trireme {

/// A read-only memory map of a whole file. Movable. An empty file maps to an empty span.
class MappedFile {
 public:
  MappedFile() = default;
  /// Throws EnvironmentError when the file cannot be opened or mapped.
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// The file's bytes. Throws EnvironmentError naming path and cause.
std::string read_file(const std::string& path);

/// Writes a temporary file beside `path`, fsyncs and renames it, so that readers see the old file or the new
/// one and nothing between. A symbolic link stays, and its target is replaced. A special file
/// (is_special_file()) is written in place. Throws EnvironmentError (disk full, read-only, ...) and leaves an
/// existing regular file untouched.
void write_file_atomic(const std::string& path, std::string_view content);

/// Whether `path` exists and is neither a regular file nor a folder: a pipe, a terminal, /dev/null.
bool is_special_file(const std::string& path);

/// The target of the symbolic link `path`, whether it exists or not; `path` itself when it is no link.
std::string follow_links(const std::string& path);

/// mkdir -p. The names of folders that it makes survive a power failure once it returns. Throws
/// EnvironmentError.
void make_directories(const std::string& path);

/// Names that were given, taken or changed in the folder `path` are on the disk when this returns. Throws
/// EnvironmentError.
void sync_folder(const std::string& path);

/// An append-only text file whose lines reach the kernel whole. Throws EnvironmentError when a write fails.
class LineFile {
 public:
  explicit LineFile(const std::string& path);
  void append(std::string_view line);  ///< adds the newline

 private:
  std::string path_;
  Descriptor file_;
};

/// write() until everything is out; throws EnvironmentError naming `path`.
void write_all(int fd, const void* data, size_t size, const std::string& path);

/// write_all() at the end of a file. When that fails, the file is cut back to its old size, so that the next
/// record does not follow a part of this one.
void append_all(int fd, const void* data, size_t size, const std::string& path);

}  // namespace trireme
