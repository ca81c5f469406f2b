#include "trireme/base/error.h"

#include <system_error>

namespace trireme {

std::string errno_text(int error) {
  return std::generic_category().message(error);
}

}  // namespace trireme
