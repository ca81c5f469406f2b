#include "trireme/checkpoint/unfinished.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/heartbeat.h"

namespace trireme::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Writing gives a sign of life at least this often.
constexpr int64_t kAtOnce = int64_t{64} << 20;

constexpr std::string_view kUnfinishedSuffix = ".trireme-tmp";

[[noreturn]] void fail_write(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError(
      "[checkpoint.safetensors] cannot {} {}: {}; free some space or choose another folder", action, path,
      errno_text(error));
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

/// The prefix of the names of all unfinished files of `path`; short enough for what follows.
std::string prefix_of(const fs::path& path) {
  constexpr size_t kLongest = 200;
  return fmt::format(".{}.", path.filename().string().substr(0, kLongest));
}

/// A file is opened for writing, without which some file systems of networks have no lock for it.
Descriptor open_any(const fs::path& path) {
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  Descriptor opened(::open(path.c_str(), O_RDWR | kFlags));
  if (!opened && errno == EISDIR) opened = Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | kFlags));
  return opened;
}

Descriptor make(const std::string& path, Unfinished::Kind kind) {
  if (kind == Unfinished::Kind::kFile)
    return Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (::mkdir(path.c_str(), 0755) != 0) return {};
  return open_any(path);
}

bool is_name_of(const Descriptor& opened, const fs::path& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(opened.get(), &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         held.st_dev == named.st_dev && held.st_ino == named.st_ino;
}

/// Whatever has a free lock, under a name that only its writer would take from it, belongs to nobody.
void remove_abandoned(const fs::path& path) {
  const std::string prefix = prefix_of(path);
  std::error_code error;
  for (fs::directory_iterator entry(folder_of(path), error), end; !error && entry != end;
       entry.increment(error)) {
    const fs::path& found = entry->path();
    const std::string name = found.filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(kUnfinishedSuffix)) continue;
    const Descriptor opened = open_any(found);
    const bool is_free = opened && ::flock(opened.get(), LOCK_EX | LOCK_NB) == 0;
    std::error_code ignored;  // the next writer tries again
    if (is_free && is_name_of(opened, found)) fs::remove_all(found, ignored);
  }
}

}  // namespace

Unfinished::Unfinished(const std::string& path, Kind kind) {
  remove_abandoned(path);
  for (int attempt = 0; !is_mine(); ++attempt) {
    const std::string name =
        fmt::format("{}{}-{}{}", prefix_of(path), ::getpid(), attempt, kUnfinishedSuffix);
    temporary_ = folder_of(path) / name;
    opened_ = make(temporary_, kind);
    // A folder may have gone before it was opened: another writer has taken it for an abandoned one.
    if (!opened_ && errno != EEXIST && errno != ENOENT) fail_write("create", path, errno);
    if (!opened_ && errno == ENOENT && !fs::is_directory(folder_of(path))) fail_write("create", path, ENOENT);
  }
}

Unfinished::~Unfinished() {
  if (opened_) remove();
}

void Unfinished::remove() {
  std::error_code ignored;  // the next writer tries again
  fs::remove_all(temporary_, ignored);
  opened_.close();
}

/// Whether there is something that nobody else removes. Another writer may have come between its creation and
/// its lock, and have taken it for an abandoned one.
bool Unfinished::is_mine() const {
  if (!opened_) return false;
  // Where the file system has no locks, nobody can take one and remove it.
  if (::flock(opened_.get(), LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;
  return is_name_of(opened_, temporary_);
}

UnfinishedFile::UnfinishedFile(const std::string& path)
    : path_(path), unfinished_(path, Unfinished::Kind::kFile) {}

void UnfinishedFile::resize(int64_t bytes) {
  if (::ftruncate(unfinished_.descriptor(), bytes) != 0) fail_write("resize", unfinished_.path(), errno);
}

void UnfinishedFile::write(int64_t offset, const void* data, int64_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kAtOnce);
    const ssize_t count = ::pwrite(unfinished_.descriptor(), next, static_cast<size_t>(part), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_write("write", unfinished_.path(), errno);
    beat();
    next += count;
    offset += count;
    bytes -= count;
    // The disk works while the next bytes come, so that fsync has little left to wait for.
    ::sync_file_range(unfinished_.descriptor(), offset - count, count, SYNC_FILE_RANGE_WRITE);
  }
}

OutputFile UnfinishedFile::output() const {
  Descriptor same(::fcntl(unfinished_.descriptor(), F_DUPFD_CLOEXEC, 0));
  if (!same) fail_write("open", unfinished_.path(), errno);
  return {std::move(same), unfinished_.path()};
}

void UnfinishedFile::finish() {
  if (::fsync(unfinished_.descriptor()) != 0) fail_write("sync", unfinished_.path(), errno);
  if (::rename(unfinished_.path().c_str(), path_.c_str()) != 0) fail_write("rename to", path_, errno);
  unfinished_.keep();
  sync_folder(folder_of(path_));
}

}  // namespace trireme::checkpoint
