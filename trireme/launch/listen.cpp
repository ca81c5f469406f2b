#include "trireme/launch/listen.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::launch {
namespace {

constexpr int kBacklog = 1024;

constexpr const char* kLoopback = "127.0.0.1";

void check(bool ok, const char* action, const std::string& host) {
  if (ok) return;
  throw EnvironmentError("[launch] cannot {} a socket on {}: {}; check that {} is up", action, host,
                         errno_text(errno), host == kLoopback ? "the loopback interface" : "its interface");
}

/// The name of a socket, as the kernel has it; port 0.
sockaddr_storage name_at(const std::string& host) {
  sockaddr_storage name{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(name);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(name);
  name.ss_family = AF_INET;
  if (::inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) return name;
  name.ss_family = AF_INET6;
  if (::inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) return name;
  throw EnvironmentError("[launch] '{}' is no address in numbers; give one of this host's interfaces", host);
}

}  // namespace

ListenSocket listen_at(const std::string& host) {
  sockaddr_storage name = name_at(host);
  ListenSocket made{.fd = Descriptor(::socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  check(static_cast<bool>(made.fd), "create", host);
  const int on = 1;
  check(::setsockopt(made.fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0, "set up", host);
  socklen_t size = name.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  auto* generic = reinterpret_cast<sockaddr*>(&name);
  check(::bind(made.fd.get(), generic, size) == 0, "bind", host);
  check(::listen(made.fd.get(), kBacklog) == 0, "listen on", host);
  check(::getsockname(made.fd.get(), generic, &size) == 0, "read the address of", host);
  made.port = ntohs(reinterpret_cast<const sockaddr_in&>(name).sin_port);  // at the same place in IPv6
  return made;
}

ListenSocket listen_on_loopback() {
  return listen_at(kLoopback);
}

}  // namespace trireme::launch
