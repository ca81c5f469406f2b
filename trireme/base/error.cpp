#include "trireme/base/error.h"

#include <csignal>
#include <system_error>

namespace trireme {

bool is_stop_code(int code) {
  return code == 128 + SIGINT || code == 128 + SIGTERM || code == 128 + SIGUSR1 || code == 128 + SIGHUP;
}

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

}  // namespace trireme
