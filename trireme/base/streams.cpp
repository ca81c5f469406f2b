#include "trireme/base/streams.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "trireme/base/error.h"

namespace trireme {

void hold_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    // The lowest number that is free is this one.
    [[maybe_unused]] const int held = ::open("/dev/null", fd == STDERR_FILENO ? O_WRONLY : O_RDONLY);
  }
}

bool reader_left(int fd) {
  pollfd stream{fd, POLLOUT, 0};
  return ::poll(&stream, 1, 0) == 1 && (stream.revents & (POLLERR | POLLHUP)) != 0;
}

int flush_results(int code) {
  const bool failed_before = std::ferror(stdout) != 0;
  const int error = std::fflush(stdout) == 0 ? 0 : errno;
  if ((error == 0 && !failed_before) || reader_left(STDOUT_FILENO)) return code;
  write_stderr(
      fmt::format("error: [base.streams] could not write all results to standard output{}{}; free space at "
                  "its destination or redirect it elsewhere\n",
                  error == 0 ? "" : ": ", error == 0 ? "" : errno_text(error)));
  return code != 0 ? code : static_cast<int>(ExitCode::kEnvironment);
}

void write_stderr(std::string_view text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace trireme
