#include "tests/checkpoint/faults.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "tests/data/scratch.h"

namespace trireme::checkpoint::testing {
namespace {

template <typename Call>
Call* real(const char* name) {
  return reinterpret_cast<Call*>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int fd) {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error);
  return error ? std::string() : path.string();
}

struct Renamed {
  std::string from, to;
  std::optional<std::string> replaced;  ///< content of the file that had the name
};

struct State {
  FaultPlan plan;
  int64_t calls = 0;
  bool counts = false;
  std::map<std::string, bool> dirty;  ///< files with bytes that were not synced
  std::vector<Renamed> renames;       ///< that were not synced
  std::vector<std::string> created;   ///< files with names that were not synced
  int64_t begun = 0;

  void lose() {
    counts = false;
    if (plan.unsynced == Unsynced::kKept) return;
    for (const auto& [path, is_dirty] : dirty) {
      std::error_code error;
      const auto size = std::filesystem::file_size(path, error);
      if (error) continue;
      std::filesystem::resize_file(path, 0, error);
      if (plan.unsynced == Unsynced::kUndone) std::filesystem::resize_file(path, size, error);
    }
    if (plan.unsynced != Unsynced::kUndone) return;
    for (const std::string& path : created) {
      std::error_code error;
      std::filesystem::remove(path, error);
    }
    for (auto renamed = renames.rbegin(); renamed != renames.rend(); ++renamed) {
      std::error_code error;
      std::filesystem::rename(renamed->to, renamed->from, error);
      if (renamed->replaced) std::ofstream(renamed->to, std::ios::binary) << *renamed->replaced;
    }
  }

  /// Whether the call that begins fails now, with errno set.
  bool begins() {
    if (!counts || ++calls != plan.at) return false;
    if (plan.fault == Fault::kKill) {
      lose();
      ::_exit(kKilled);
    }
    if (plan.fault != Fault::kError) return false;
    errno = plan.error;
    return true;
  }

  void note_rename(const std::string& from, const std::string& to) {
    const auto moved = [&](const std::string& path) {
      const bool inside = path == from || path.starts_with(from + "/");
      return inside ? to + path.substr(from.size()) : path;
    };
    std::map<std::string, bool> now_dirty;
    for (const auto& [path, is_dirty] : dirty) now_dirty.emplace(moved(path), is_dirty);
    dirty = std::move(now_dirty);
    for (std::string& path : created) path = moved(path);
    Renamed renamed{from, to, {}};
    if (std::filesystem::is_regular_file(to)) renamed.replaced = trireme::testing::slurp(to);
    renames.push_back(std::move(renamed));
  }

  /// The names in a folder are on the disk.
  void note_sync(const std::string& folder) {
    const auto is_in_it = [&](const std::string& path) {
      return std::filesystem::path(path).parent_path() == folder;
    };
    std::erase_if(renames, [&](const Renamed& renamed) { return is_in_it(renamed.to); });
    std::erase_if(created, is_in_it);
  }
};

State& state() {
  static State state;
  return state;
}

}  // namespace

void plan_fault(const FaultPlan& plan) {
  state() = State{.plan = plan, .counts = true, .dirty = {}, .renames = {}, .created = {}};
}

int64_t end_faults() {
  state().counts = false;
  return state().calls;
}

void cut_power() {
  state().lose();
}

int64_t bytes_begun() {
  return state().begun;
}

}  // namespace trireme::checkpoint::testing

using namespace trireme::checkpoint::testing;

extern "C" {

int openat(int folder, const char* name, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list more;
    va_start(more, flags);
    mode = va_arg(more, mode_t);
    va_end(more);
    if (state().begins()) return -1;
    if (state().counts) state().created.push_back(path_of(folder) + "/" + name);
  }
  return real<int(int, const char*, int, ...)>("openat")(folder, name, flags, mode);
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  if (state().begins()) return -1;
  const bool shortened =
      state().counts && state().plan.fault == Fault::kShortWrite && state().calls == state().plan.at;
  if (state().counts) state().dirty[path_of(fd)] = true;
  return real<ssize_t(int, const void*, size_t, off_t)>("pwrite")(fd, data, shortened ? (size + 1) / 2 : size,
                                                                  offset);
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
  if (state().begins()) return -1;
  if (state().counts && state().plan.fault == Fault::kReserve) {
    errno = state().plan.error;
    return -1;
  }
  if (state().counts) state().dirty[path_of(fd)] = true;
  return real<int(int, int, off_t, off_t)>("fallocate")(fd, mode, offset, size);
}

int fsync(int fd) {
  if (state().begins()) return -1;
  if (state().counts) {
    const std::string path = path_of(fd);
    state().dirty.erase(path);
    state().note_sync(path);
  }
  return real<int(int)>("fsync")(fd);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  if (state().begins()) return -1;
  if (state().counts) state().note_rename(path_of(from_folder) + "/" + from, path_of(to_folder) + "/" + to);
  return real<int(int, const char*, int, const char*)>("renameat")(from_folder, from, to_folder, to);
}

int rename(const char* from, const char* to) noexcept {
  if (state().begins()) return -1;
  if (state().counts) state().note_rename(from, to);
  return real<int(const char*, const char*)>("rename")(from, to);
}

/// Whole paths, as those of rename().
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (state().begins()) return -1;
  if (state().counts && state().plan.fault == Fault::kRenameToFree) {
    errno = state().plan.error;
    return -1;
  }
  if (state().counts && (flags & RENAME_EXCHANGE) == 0) state().note_rename(from, to);
  using Rename = int(int, const char*, int, const char*, unsigned);
  return real<Rename>("renameat2")(from_folder, from, to_folder, to, flags);
}

int mkdirat(int folder, const char* name, mode_t mode) {
  if (state().begins()) return -1;
  return real<int(int, const char*, mode_t)>("mkdirat")(folder, name, mode);
}

int unlinkat(int folder, const char* name, int flags) {
  if (state().begins()) return -1;
  return real<int(int, const char*, int)>("unlinkat")(folder, name, flags);
}

int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
  if (state().counts) state().begun = state().begun == offset ? offset + size : -1;
  return real<int(int, off64_t, off64_t, unsigned)>("sync_file_range")(fd, offset, size, flags);
}

int ftruncate(int fd, off_t size) noexcept {
  if (state().begins()) return -1;
  return real<int(int, off_t)>("ftruncate")(fd, size);
}
}
