#include "trireme/base/lock_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// O_NONBLOCK: if the name is a pipe, opening it must not wait.
constexpr int kOpen = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

std::string text_in(const Descriptor& file) {
  char text[64] = {};
  const ssize_t size = ::pread(file.get(), text, sizeof text, 0);
  return {text, size > 0 ? static_cast<size_t>(size) : 0};
}

/// The text is for people only, so nothing hangs on whether it could be written.
void put(const Descriptor& file, const std::string& text) {
  [[maybe_unused]] const int cut = ::ftruncate(file.get(), 0);
  [[maybe_unused]] const ssize_t written = ::pwrite(file.get(), text.data(), text.size(), 0);
}

}  // namespace

std::optional<LockFile> LockFile::take(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | kOpen, 0644));
  if (!file)
    throw EnvironmentError("[base.lock_file] cannot open {}: {}; make its folder writable", path,
                           errno_text(errno));
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return std::nullopt;
  LockFile lock(std::move(file), {});
  lock.before_ = text_in(lock.file_);
  put(lock.file_, std::to_string(::getpid()));
  return lock;
}

std::optional<std::string> LockFile::holder(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | kOpen));
  // Shared, so that several who look at once do not take each other for the holder.
  if (!file || ::flock(file.get(), LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK) return std::nullopt;
  return text_in(file);
}

std::string LockFile::number_in(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | kOpen));
  return file ? text_in(file) : std::string();
}

LockFile::~LockFile() {
  if (file_) put(file_, before_);
}

}  // namespace trireme
