#pragma once
// Files with errors that name the path and the cause: read-only maps, whole-file reads, writes that are
// complete or absent.
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

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

/// Writes a file of a new name beside it, fsyncs and renames, so that readers see the old file or the new one
/// and nothing between; a symbolic link stays and leads to the new one. What is_special_file() is written as
/// it is. Throws EnvironmentError (disk full, read-only, ...) and leaves an existing file untouched.
void write_file_atomic(const std::string& path, std::string_view content);

/// Whether there is something that is neither a regular file nor a folder: a pipe, a terminal, /dev/null.
bool is_special_file(const std::string& path);

/// What symbolic links at `path` lead to, whether that is there or not; `path` where it is none.
std::string follow_links(const std::string& path);

/// mkdir -p. Throws EnvironmentError.
void make_directories(const std::string& path);

/// An append-only text file whose lines reach the kernel whole. Throws EnvironmentError when a write fails.
class LineFile {
 public:
  explicit LineFile(const std::string& path);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;
  void append(std::string_view line);  ///< adds the newline

 private:
  std::string path_;
  int fd_ = -1;
};

/// write() until everything is out; throws EnvironmentError naming `path`.
void write_all(int fd, const void* data, size_t size, const std::string& path);

/// The same at the end of a file, which stays as it was when not everything fits, so that a later record does
/// not begin in the middle of this one.
void append_all(int fd, const void* data, size_t size, const std::string& path);

}  // namespace trireme
