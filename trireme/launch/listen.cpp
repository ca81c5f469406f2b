#include "trireme/launch/listen.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::launch {
namespace {

constexpr int kBacklog = 1024;

void check(bool ok, const char* action) {
  if (ok) return;
  throw EnvironmentError(
      "[launch] cannot {} a socket on 127.0.0.1: {}; check that the loopback interface is up", action,
      errno_text(errno));
}

}  // namespace

ListenSocket listen_on_loopback() {
  ListenSocket made{.fd = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  check(static_cast<bool>(made.fd), "create");
  const int on = 1;
  check(::setsockopt(made.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0, "set up");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  check(::bind(made.fd.get(), generic, size) == 0, "bind");
  check(::listen(made.fd.get(), kBacklog) == 0, "listen on");
  check(::getsockname(made.fd.get(), generic, &size) == 0, "read the address of");
  made.port = ntohs(address.sin_port);
  return made;
}

}  // namespace trireme::launch
