#include "trireme/controller/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace trireme::controller {
namespace {

class PlainChannel : public Channel {
 public:
  explicit PlainChannel(int fd) : fd_(fd) {}

  Moved read(std::span<char> target) override {
    ssize_t count = 0;
    do {
      count = ::recv(fd_, target.data(), target.size(), 0);
    } while (count < 0 && errno == EINTR);
    return outcome(count, count != 0);
  }
  Moved write(std::string_view bytes) override {
    ssize_t count = 0;
    do {
      count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    } while (count < 0 && errno == EINTR);
    return outcome(count, true);
  }
  short read_events() const override { return POLLIN; }
  short write_events() const override { return POLLOUT; }
  bool established() const override { return true; }

 private:
  static Moved outcome(ssize_t count, bool open) {
    if (count < 0) return {.bytes = 0, .open = errno == EAGAIN};
    return {.bytes = static_cast<size_t>(count), .open = open};
  }

  int fd_;
};

}  // namespace

std::unique_ptr<Channel> plain_channel(int fd) {
  return std::make_unique<PlainChannel>(fd);
}

}  // namespace trireme::controller
