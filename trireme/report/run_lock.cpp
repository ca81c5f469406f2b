#include "trireme/report/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::report {

std::optional<RunLock> RunLock::take(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!file)
    throw EnvironmentError("[report.run_lock] cannot open {}: {}; make its folder writable", path,
                           errno_text(errno));
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return std::nullopt;
  const std::string mine = std::to_string(::getpid());
  [[maybe_unused]] const int cut = ::ftruncate(file.get(), 0);  // for people only
  [[maybe_unused]] const ssize_t put = ::pwrite(file.get(), mine.data(), mine.size(), 0);
  return RunLock(std::move(file));
}

std::optional<std::string> RunLock::holder(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  // Shared, so that several who look at once do not take each other for the holder.
  if (!file || ::flock(file.get(), LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) return std::nullopt;
  char text[64] = {};
  const ssize_t size = ::pread(file.get(), text, sizeof text, 0);
  return std::string(text, size > 0 ? static_cast<size_t>(size) : 0);
}

}  // namespace trireme::report
