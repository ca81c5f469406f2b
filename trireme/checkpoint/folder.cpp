#include "trireme/checkpoint/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"

namespace trireme::checkpoint {
namespace {

/// Reading and writing give a sign of life at least this often.
constexpr int64_t kBeatEvery = int64_t{64} << 20;

constexpr size_t kMaxFileName = 128;
constexpr mode_t kFileMode = 0644;
constexpr mode_t kFolderMode = 0755;
/// A pipe or device shall not keep the caller waiting for its other end.
constexpr int kReadFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;

const char* advice(int error) {
  if (error == ENOSPC || error == EDQUOT) return "free some space or choose another folder";
  if (error == EROFS || error == EACCES || error == EPERM) return "choose a writable folder";
  return "check the path and the disk";
}

[[noreturn]] void fail(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError("[checkpoint.folder] cannot {} {}: {}; {}", action, path, errno_text(error),
                         advice(error));
}

void check_name(std::string_view name) {
  TRIREME_CHECK(is_file_name(name), "[checkpoint.folder] '{:.200}' is not a valid file name", name);
}

/// Opens something whose name came from a file; it may be missing, or not be what it should be.
Descriptor open_inside(int folder, const std::string& name, int flags, const std::string& path) {
  if (!is_file_name(name)) {
    throw DataError(
        "[checkpoint.folder] '{:.200}' is not a valid name for a checkpoint file; names are 1 to 128 "
        "letters, digits, '.', '_' or '-' and do not start with a dot",
        name);
  }
  const int fd = ::openat(folder, name.c_str(), kReadFlags | O_NOFOLLOW | flags);
  if (fd >= 0) return Descriptor(fd);
  if (errno == ENOENT || errno == ELOOP || errno == ENOTDIR || errno == ENXIO || errno == EIO) {
    throw DataError("[checkpoint.folder] {}: {}; the checkpoint is incomplete, use another one", path,
                    errno == ELOOP ? "is a symbolic link, which is not followed" : errno_text(errno));
  }
  fail("open", path, errno);
}

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  file_ = Descriptor(::open(path.c_str(), kReadFlags));
  if (!file_) fail("open", path, errno);
  *this = InputFile(std::move(file_), path);
}

InputFile::InputFile(Descriptor file, std::string path) : file_(std::move(file)), path_(std::move(path)) {
  struct stat info {};
  if (::fstat(file_.get(), &info) != 0) fail("stat", path_, errno);
  if (!S_ISREG(info.st_mode))
    throw DataError("[checkpoint.folder] {} is not a regular file; give the path of the file itself", path_);
  size_ = static_cast<int64_t>(info.st_size);
}

void InputFile::read(int64_t offset, void* out, int64_t bytes) const {
  TRIREME_CHECK(offset >= 0 && bytes >= 0, "[checkpoint.folder] {}: cannot read {} bytes at {}", path_, bytes,
                offset);
  char* next = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t count =
        ::pread(file_.get(), next, static_cast<size_t>(std::min(bytes, kBeatEvery)), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw DataError("[checkpoint.folder] cannot read {} bytes at {} of {}: {}; check the disk", bytes,
                      offset, path_, errno_text(errno));
    }
    beat();
    if (count == 0) {
      throw DataError("[checkpoint.folder] {} ends at byte {}, but {} more are needed; the file is truncated",
                      path_, offset, bytes);
    }
    next += count;
    offset += count;
    bytes -= count;
  }
}

std::string InputFile::text(int64_t limit) const {
  if (size_ > limit) {
    throw DataError("[checkpoint.folder] {} has {} bytes, but the limit is {}; it is not a checkpoint file",
                    path_, size_, limit);
  }
  std::string text(static_cast<size_t>(size_), '\0');
  read(0, text.data(), size_);
  return text;
}

void OutputFile::reserve(int64_t bytes) {
  if (bytes == 0 || ::fallocate(file_.get(), 0, 0, bytes) == 0) return;
  if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINTR) return;  // it will tell when it is written
  fail(fmt::format("reserve {} bytes for", bytes), path_, errno);
}

void OutputFile::append(const void* data, int64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count =
        ::pwrite(file_.get(), next, static_cast<size_t>(std::min(bytes, kBeatEvery)), size_);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", path_, errno);
    beat();
    next += count;
    size_ += count;
    bytes -= count;
  }
  // The disk works while the next bytes come. What fails now fails in fsync as well, which reports it.
  constexpr int64_t kAtOnce = int64_t{16} << 20;
  if (size_ - begun_ < kAtOnce) return;
  ::sync_file_range(file_.get(), begun_, size_ - begun_, SYNC_FILE_RANGE_WRITE);
  begun_ = size_;
}

void OutputFile::finish() {
  // A failed fsync is not repeated: the kernel may have dropped the pages that it could not write.
  if (::fsync(file_.get()) != 0) fail("sync", path_, errno);
  if (const int error = file_.close(); error != 0) fail("close", path_, error);
}

bool is_file_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  return !name.empty() && name.size() <= kMaxFileName && name.front() != '.' &&
         std::ranges::all_of(name, fits);
}

Folder::Folder(const std::string& path) : path_(path) {
  folder_ = Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) fail("open folder", path, errno);
}

bool Folder::is_in_place() const {
  struct stat held {};
  struct stat named {};
  return ::fstat(folder_.get(), &held) == 0 && ::stat(path_.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

std::vector<std::string> Folder::names() const {
  const int fd = ::openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(fd < 0 ? nullptr : ::fdopendir(fd), ::closedir);
  if (!entries) fail("list", path_, errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  if (errno != 0) fail("list", path_, errno);
  std::ranges::sort(names);
  return names;
}

bool Folder::has(const std::string& name) const {
  struct stat info {};
  return is_file_name(name) && ::fstatat(folder_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

InputFile Folder::open_file(const std::string& name) const {
  return {open_inside(folder_.get(), name, 0, path_of(name)), path_of(name)};
}

Folder Folder::open_folder(const std::string& name) const {
  return {open_inside(folder_.get(), name, O_DIRECTORY, path_of(name)), path_of(name)};
}

OutputFile Folder::create_file(const std::string& name) const {
  check_name(name);
  const int fd =
      ::openat(folder_.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode);
  if (fd < 0) fail("create", path_of(name), errno);
  return {Descriptor(fd), path_of(name)};
}

void Folder::write_file(const std::string& name, std::string_view content) const {
  const std::string temporary = name + ".tmp";
  remove(temporary);  // of a process that has ended half-way
  try {
    OutputFile file = create_file(temporary);
    file.append(content.data(), static_cast<int64_t>(content.size()));
    file.finish();
    rename(temporary, name);
  } catch (...) {
    ::unlinkat(folder_.get(), temporary.c_str(), 0);
    throw;
  }
  sync();
}

Folder Folder::create_folder(const std::string& name) const {
  check_name(name);
  if (::mkdirat(folder_.get(), name.c_str(), kFolderMode) != 0) fail("create folder", path_of(name), errno);
  return open_folder(name);
}

void Folder::rename(const std::string& from, const std::string& to) const {
  check_name(from);
  check_name(to);
  if (::renameat(folder_.get(), from.c_str(), folder_.get(), to.c_str()) != 0)
    fail(fmt::format("rename {} to", from), path_of(to), errno);
}

void Folder::remove(const std::string& name) const {
  check_name(name);
  if (::unlinkat(folder_.get(), name.c_str(), 0) == 0 || errno == ENOENT) return;
  if (errno != EISDIR && errno != EPERM) fail("remove", path_of(name), errno);
  {
    const Folder inside = open_folder(name);
    for (const std::string& entry : inside.names()) {
      if (::unlinkat(inside.folder_.get(), entry.c_str(), 0) != 0 && errno != ENOENT)
        fail("remove", inside.path_of(entry), errno);
    }
  }
  if (::unlinkat(folder_.get(), name.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT)
    fail("remove", path_of(name), errno);
}

void Folder::sync() const {
  if (::fsync(folder_.get()) != 0) fail("sync", path_, errno);
}

}  // namespace trireme::checkpoint
