#include "trireme/launch/fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::launch {

void Fd::close() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0) ::close(fd);
}

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw EnvironmentError("[launch] cannot create a pipe: {}; raise the open-file limit (ulimit -n)",
                           errno_text(errno));
  }
  Pipe pipe{.read = Fd(ends[0]), .write = Fd(ends[1])};
  ::fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK);
  return pipe;
}

Fd open_null() {
  for (;;) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) throw EnvironmentError("[launch] cannot open /dev/null: {}; check /dev", errno_text(errno));
    if (fd <= STDERR_FILENO) continue;
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return Fd(fd);
  }
}

}  // namespace trireme::launch
