#include "trireme/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"

namespace trireme {
namespace {

[[noreturn]] void fail(std::string_view action, const std::string& path, int error) {
  const char* fix = "check the path and its permissions";
  if (error == ENOSPC || error == EDQUOT) fix = "free some space or choose another folder";
  if (error == EROFS) fix = "choose a folder on a writable file system";
  throw EnvironmentError("[base.file] cannot {} {}: {}; {}", action, path, errno_text(error), fix);
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) fail("open", path, errno);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail("stat", path, errno);
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED) fail("map", path, errno);
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept {
  *this = std::move(other);
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::string read_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) fail("open", path, errno);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) fail("stat", path, errno);
  if (S_ISDIR(info.st_mode)) fail("read", path, EISDIR);
  std::string content;
  content.reserve(static_cast<size_t>(info.st_size));
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file.get(), buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", path, errno);
    beat();
    if (count == 0) return content;
    content.append(buffer, static_cast<size_t>(count));
  }
}

void write_all(int fd, const void* data, size_t size, const std::string& path) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(fd, next, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write", path, errno);
    beat();
    next += count;
    size -= static_cast<size_t>(count);
  }
}

void append_all(int fd, const void* data, size_t size, const std::string& path) {
  const off_t end = ::lseek(fd, 0, SEEK_END);
  try {
    write_all(fd, data, size, path);
  } catch (const EnvironmentError&) {
    [[maybe_unused]] const int cut =
        end >= 0 ? ::ftruncate(fd, end) : -1;  // the first failure is the one to tell
    throw;
  }
}

bool is_special_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode);
}

std::string follow_links(const std::string& path) {
  namespace fs = std::filesystem;
  constexpr int kMostLinks = 40;  // as the kernel
  std::error_code error;
  fs::path target = path;
  for (int i = 0; i < kMostLinks && fs::is_symlink(target, error); ++i) {
    const fs::path next = fs::read_symlink(target, error);
    if (error) break;  // it has gone in the meantime
    target = target.parent_path() / next;
  }
  return target.string();
}

namespace {

/// A file beside `path` under a name that nobody else has.
Descriptor create_beside(const std::string& path, std::string& name) {
  for (int attempt = 0;; ++attempt) {
    name = fmt::format("{}.{}-{}.tmp", path, ::getpid(), attempt);
    Descriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (file) return file;
    if (errno != EEXIST) fail("create", name, errno);
  }
}

}  // namespace

void write_file_atomic(const std::string& path, std::string_view content) {
  if (is_special_file(path)) {
    const Descriptor file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!file) fail("open", path, errno);
    return write_all(file.get(), content.data(), content.size(), path);
  }
  const std::string target = follow_links(path);
  std::string temporary;
  const Descriptor file = create_beside(target, temporary);
  try {
    write_all(file.get(), content.data(), content.size(), temporary);
    if (::fsync(file.get()) != 0) fail("sync", temporary, errno);
    if (::rename(temporary.c_str(), target.c_str()) != 0) fail("rename to", target, errno);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

namespace {

/// A folder that may be written to but not read cannot be synced, and is used all the same.
void sync_parent(const std::filesystem::path& path) {
  const std::string parent = path.has_parent_path() ? path.parent_path().string() : ".";
  if (::access(parent.c_str(), R_OK) == 0) sync_folder(parent);
}

}  // namespace

void make_directories(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> missing;
  for (fs::path folder = path; !folder.empty() && !fs::exists(folder, error); folder = folder.parent_path())
    missing.push_back(folder);
  fs::create_directories(path, error);
  if (error) fail("create folder", path, error.value());
  for (const fs::path& folder : missing) sync_parent(folder);
}

void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder) fail("open", path, errno);
  // Some file systems of networks and of user space do not sync folders.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) fail("sync", path, errno);
}

LineFile::LineFile(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
  if (!file_) fail("open", path, errno);
}

void LineFile::append(std::string_view line) {
  std::string text(line);
  text += '\n';
  append_all(file_.get(), text.data(), text.size(), path_);
}

}  // namespace trireme
