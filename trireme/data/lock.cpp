#include "trireme/data/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"

namespace trireme::data {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(20);

bool try_lock(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
  if (errno != EWOULDBLOCK && errno != EINTR) throw_errno("lock", path, errno);
  return false;
}

void wait_for_lock(int fd, const std::string& path, double timeout_s) {
  const double deadline = monotonic_seconds() + timeout_s;
  log_info("[data.lock] process {} holds {}; waiting for it", read_file(path), path);
  while (!try_lock(fd, path)) {
    if (monotonic_seconds() > deadline) {
      throw EnvironmentError(
          "[data.lock] process {} still holds {} after {:.0f} s; wait for it or end it, and run again",
          read_file(path), path, timeout_s);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace

FileLock::FileLock(const std::string& path, double timeout_s)
    : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
  if (!file_) throw_errno("create", path, errno);
  if (!try_lock(file_.get(), path)) wait_for_lock(file_.get(), path, timeout_s);
  const std::string holder = std::to_string(::getpid());
  if (::ftruncate(file_.get(), 0) != 0) throw_errno("truncate", path, errno);
  write_all(file_.get(), holder.data(), holder.size(), path);
}

}  // namespace trireme::data
