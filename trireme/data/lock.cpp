#include "trireme/data/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/data/posix.h"

namespace trireme::data {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);
constexpr double kLifePeriod_s = 0.5;
constexpr double kSilence_s = 5.0;  // short waits are nobody's news

Descriptor open_lock(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!file) throw_errno("create", path, errno);
  return file;
}

bool try_lock(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK && errno != EINTR) throw_errno("lock", path, errno);
  return false;
}

void write_holder(int fd, const std::string& path) {
  const std::string holder = std::to_string(::getpid());
  if (::ftruncate(fd, 0) != 0) throw_errno("truncate", path, errno);
  write_all(fd, holder.data(), holder.size(), path);
}

/// When the holder last showed life.
std::pair<int64_t, int64_t> last_sign(int fd) {
  struct stat info {};
  ::fstat(fd, &info);
  return {info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
}

void wait_for_lock(int fd, const std::string& path, double timeout_s,
                   const std::function<void(bool)>& while_waiting) {
  auto sign = last_sign(fd);
  const double began = monotonic_seconds();
  double now = began, alive_at = began;
  bool said = false;
  for (; !try_lock(fd, path); now = monotonic_seconds()) {
    const auto latest = last_sign(fd);
    const bool alive = std::exchange(sign, latest) != latest;
    if (alive) alive_at = now;
    if (!said && now - began > kSilence_s) {
      log_info("[data.lock] waiting for process {}, which holds {}", read_file(path), path);
      said = true;
    }
    if (now - alive_at > timeout_s) {
      throw EnvironmentError(
          "[data.lock] process {} still holds {} but has not updated it for {:.0f} s; wait for it or stop "
          "it, then run again",
          read_file(path), path, timeout_s);
    }
    while_waiting(alive);
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace

FileLock::FileLock(const std::string& path, double timeout_s,
                   const std::function<void(bool alive)>& while_waiting)
    : file_(open_lock(path)) {
  if (!try_lock(file_.get(), path)) wait_for_lock(file_.get(), path, timeout_s, while_waiting);
  write_holder(file_.get(), path);
}

std::optional<FileLock> FileLock::try_take(const std::string& path) {
  Descriptor file = open_lock(path);
  if (!try_lock(file.get(), path)) return std::nullopt;
  write_holder(file.get(), path);
  return FileLock(std::move(file));
}

void FileLock::show_life() {
  const double now = monotonic_seconds();
  if (now - shown_at_ < kLifePeriod_s) return;
  shown_at_ = now;
  ::futimens(file_.get(), nullptr);
}

}  // namespace trireme::data
