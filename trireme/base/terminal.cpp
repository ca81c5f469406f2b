#include "trireme/base/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

namespace trireme {

int64_t terminal_columns(int fd) {
  constexpr int64_t kUsual = 80;
  if (fd < 0 || ::isatty(fd) == 0) return 0;
  winsize size{};
  const bool known = ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsual;
}

}  // namespace trireme
