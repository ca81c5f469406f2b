#include "trireme/base/descriptor.h"

#include <unistd.h>

#include <cerrno>

namespace trireme {

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Descriptor::close() noexcept {
  const int fd = release();
  return fd < 0 || ::close(fd) == 0 ? 0 : errno;
}

}  // namespace trireme
