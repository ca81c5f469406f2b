#include "trireme/data/posix.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::data {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

void throw_errno(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError(
      "[data.file] cannot {} {}: {}; check the cache folder's space and permissions, or set "
      "XDG_CACHE_HOME to another one",
      action, path, errno_text(error));
}

void sync_path(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw_errno("open", path, errno);
  if (::fsync(file.get()) != 0) throw_errno("sync", path, errno);
}

}  // namespace trireme::data
