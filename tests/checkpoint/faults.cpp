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

  void rename_in_dirty(const std::string& from, const std::string& to) {
    std::map<std::string, bool> moved;
    for (const auto& [path, is_dirty] : dirty) {
      const bool inside = path == from || path.starts_with(from + "/");
      moved.emplace(inside ? to + path.substr(from.size()) : path, is_dirty);
    }
    dirty = std::move(moved);
  }
};

State& state() {
  static State state;
  return state;
}

}  // namespace

void plan_fault(const FaultPlan& plan) {
  state() = State{.plan = plan, .counts = true, .dirty = {}, .renames = {}};
}

int64_t end_faults() {
  state().counts = false;
  return state().calls;
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
    std::erase_if(state().renames, [&](const Renamed& renamed) {
      return std::filesystem::path(renamed.to).parent_path() == path;
    });
  }
  return real<int(int)>("fsync")(fd);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  if (state().begins()) return -1;
  if (state().counts) {
    Renamed renamed{path_of(from_folder) + "/" + from, path_of(to_folder) + "/" + to, {}};
    if (std::filesystem::is_regular_file(renamed.to)) renamed.replaced = trireme::testing::slurp(renamed.to);
    state().rename_in_dirty(renamed.from, renamed.to);
    state().renames.push_back(std::move(renamed));
  }
  return real<int(int, const char*, int, const char*)>("renameat")(from_folder, from, to_folder, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (state().counts && state().plan.fault == Fault::kRenameToFree) {
    errno = state().plan.error;
    return -1;
  }
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

int ftruncate(int fd, off_t size) noexcept {
  if (state().begins()) return -1;
  return real<int(int, off_t)>("ftruncate")(fd, size);
}
}
