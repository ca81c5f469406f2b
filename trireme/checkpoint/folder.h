#pragma once
// Folders and files of checkpoints, by descriptor: a name is one component that no link can lead out of its
// folder, and nothing but regular files is opened. Whatever a reader is given may be hostile.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/base/descriptor.h"

namespace trireme::checkpoint {

/// A regular file, read by ranges. Its size is that at opening; when the file has shrunk since, read()
/// throws, where a memory map would raise a signal.
class InputFile {
 public:
  /// Follows links, for files that a user names. Throws EnvironmentError when it cannot be opened, DataError
  /// when it is no regular file.
  explicit InputFile(const std::string& path);
  InputFile(Descriptor file, std::string path);

  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }
  /// Bytes [offset, offset + bytes) to `out`. Thread-safe. Throws DataError when they are not there or the
  /// disk cannot read them.
  void read(int64_t offset, void* out, int64_t bytes) const;
  /// The whole file. Throws DataError when it is longer than `limit` bytes.
  std::string text(int64_t limit) const;

 private:
  Descriptor file_;
  std::string path_;
  int64_t size_ = 0;
};

/// A new file. Errors of the disk are EnvironmentError, and name the file.
class OutputFile {
 public:
  OutputFile(Descriptor file, std::string path) : file_(std::move(file)), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  ///< bytes appended so far
  /// Reserves `bytes` in all, where the file system can: it then says at once when they do not fit.
  void reserve(int64_t bytes);
  void append(const void* data, int64_t bytes);
  /// When this returns, the bytes written are on the disk and the file is closed.
  void finish();

 private:
  Descriptor file_;
  std::string path_;
  int64_t size_ = 0;
  int64_t begun_ = 0;  ///< bytes whose way to the disk has begun
};

/// Whether a file may have this name: 1 to 128 of [A-Za-z0-9._-], no dot first.
bool is_file_name(std::string_view name);

class Folder {
 public:
  /// Throws EnvironmentError when there is none.
  explicit Folder(const std::string& path);

  const std::string& path() const { return path_; }
  /// Whether the path still leads here; otherwise the folder was removed or renamed since it was opened.
  bool is_in_place() const;
  std::string path_of(std::string_view name) const { return path_ + "/" + std::string(name); }

  /// Names of what is inside but "." and "..", sorted.
  std::vector<std::string> names() const;
  bool has(const std::string& name) const;
  /// A regular file here. Throws DataError when there is none, or something else of that name (a link, a
  /// device, a pipe, a folder).
  InputFile open_file(const std::string& name) const;
  /// A folder here; DataError as above.
  Folder open_folder(const std::string& name) const;

  /// A file that does not exist yet.
  OutputFile create_file(const std::string& name) const;
  /// Writes a whole file so that it is there complete or not at all: under another name, synced, renamed.
  void write_file(const std::string& name, std::string_view content) const;
  Folder create_folder(const std::string& name) const;
  /// A file or folder here gets the name `to`, which must be free or, for a file, a file's.
  void rename(const std::string& from, const std::string& to) const;
  /// Removes a file, or a folder of files, as far as it is there.
  void remove(const std::string& name) const;
  /// Names that were given or taken are on the disk when this returns.
  void sync() const;

 private:
  Folder(Descriptor folder, std::string path) : folder_(std::move(folder)), path_(std::move(path)) {}

  Descriptor folder_;
  std::string path_;
};

}  // namespace trireme::checkpoint
