#include "trireme/launch/outlet.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::launch {
namespace {

bool takes_bytes(int fd) {
  pollfd one{.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&one, 1, 0) == 1;
}

}  // namespace

void Outlet::write(std::string_view bytes) {
  if (broken_) return;
  queue_ += bytes;
  pump();
}

void Outlet::pump() {
  while (pending() && takes_bytes(fd_)) {
    // A pipe that is ready for writing takes PIPE_BUF bytes without blocking; it promises no more.
    const size_t count = std::min<size_t>(PIPE_BUF, queue_.size() - written_);
    const ssize_t done = ::write(fd_, queue_.data() + written_, count);
    if (done >= 0) {
      written_ += static_cast<size_t>(done);
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      return fail(errno);
    }
  }
  if (written_ > kChoked || !pending()) {
    queue_.erase(0, written_);
    written_ = 0;
  }
}

void Outlet::fail(int error) {
  broken_ = true;
  hung_up_ = error == EPIPE;
  queue_.clear();
  written_ = 0;
  if (!hung_up_)
    log_warning("[launch] cannot write to {}: {}; further output to it is dropped", name_, errno_text(error));
}

}  // namespace trireme::launch
