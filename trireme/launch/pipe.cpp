#include "trireme/launch/pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::launch {

Pipe make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw EnvironmentError("[launch] cannot create a pipe: {}; raise the open-file limit (ulimit -n)",
                           errno_text(errno));
  }
  Pipe pipe{.read = Descriptor(ends[0]), .write = Descriptor(ends[1])};
  ::fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK);
  return pipe;
}

Descriptor open_null() {
  for (;;) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd < 0) throw EnvironmentError("[launch] cannot open /dev/null: {}; check /dev", errno_text(errno));
    if (fd <= STDERR_FILENO) continue;
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return Descriptor(fd);
  }
}

}  // namespace trireme::launch
