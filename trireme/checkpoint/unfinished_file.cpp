#include "trireme/checkpoint/unfinished_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinishedSuffix = ".trireme-tmp";

[[noreturn]] void fail_write(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError(
      "[checkpoint.safetensors] cannot {} {}: {}; free some space or choose another folder", action, path,
      errno_text(error));
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

/// What the names of the unfinished files of `path` begin with.
std::string prefix_of(const fs::path& path) {
  return fmt::format(".{}.", path.filename().string());
}

bool is_name_of(const Descriptor& file, const fs::path& path) {
  struct stat opened {};
  struct stat named {};
  return ::fstat(file.get(), &opened) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
}

/// Every writer holds a lock on its file, which the kernel gives back when the writer dies. A file whose lock
/// is free, under a name that only its writer would take from it, belongs to nobody.
void remove_abandoned(const fs::path& path) {
  const std::string prefix = prefix_of(path);
  std::error_code error;
  for (fs::directory_iterator entry(folder_of(path), error), end; !error && entry != end;
       entry.increment(error)) {
    const fs::path& found = entry->path();
    const std::string name = found.filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kUnfinishedSuffix)) continue;
    const Descriptor file(::open(found.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    const bool is_free = file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
    if (is_free && is_name_of(file, found)) ::unlink(found.c_str());
  }
}

void sync_folder(const std::string& folder) {
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) fail_write("open", folder, errno);
  if (::fsync(opened.get()) != 0) fail_write("sync", folder, errno);
}

}  // namespace

UnfinishedFile::UnfinishedFile(std::string path) : path_(std::move(path)) {
  remove_abandoned(path_);
  for (int attempt = 0; !is_mine(); ++attempt) {
    const std::string name =
        fmt::format("{}{}-{}{}", prefix_of(path_), ::getpid(), attempt, kUnfinishedSuffix);
    temporary_ = folder_of(path_) / name;
    file_ = Descriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!file_ && errno != EEXIST) fail_write("create", path_, errno);
  }
}

UnfinishedFile::~UnfinishedFile() {
  if (file_) ::unlink(temporary_.c_str());
}

/// Whether there is a file that nobody else removes. Another writer may have come between the creation of
/// the file and its lock, and have taken it for an abandoned one.
bool UnfinishedFile::is_mine() const {
  if (!file_) return false;
  // Where the file system has no locks, nobody can take one and remove the file.
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;
  return is_name_of(file_, temporary_);
}

void UnfinishedFile::resize(int64_t bytes) {
  if (::ftruncate(file_.get(), bytes) != 0) fail_write("resize", temporary_, errno);
}

void UnfinishedFile::write(int64_t offset, const void* data, int64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t count = ::pwrite(file_.get(), next, static_cast<size_t>(bytes), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_write("write", temporary_, errno);
    next += count;
    offset += count;
    bytes -= count;
  }
}

void UnfinishedFile::finish() {
  if (::fsync(file_.get()) != 0) fail_write("sync", temporary_, errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_write("rename to", path_, errno);
  file_.close();
  sync_folder(folder_of(path_));
}

}  // namespace trireme::checkpoint
