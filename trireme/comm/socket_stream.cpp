// Bytes from one rank to another over TCP. The reader listens at a port of the kernel's choice and knows the
// writer by a word that only the job's store has told it.
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/comm/byte_stream.h"

namespace trireme::comm {
namespace {

using Word = std::array<char, 32>;
/// How long a stranger that connects can hold up the writer.
constexpr double kGreeting_s = 2.0;

int milliseconds_until(double deadline) {
  return static_cast<int>(std::lround(1000.0 * std::clamp(deadline - monotonic_seconds(), 0.0, 86400.0)));
}

/// False once `deadline` has passed; a signal in between does not end the wait.
bool is_ready(const Descriptor& socket, short events, double deadline) {
  pollfd entry{.fd = socket.get(), .events = events, .revents = 0};
  int ready;
  do {
    ready = ::poll(&entry, 1, milliseconds_until(deadline));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& address, const std::string& port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(address.c_str(), port.c_str(), &hints, &found);
  if (status != 0) {
    throw CommError("[comm.make_link] {}:{} is not a valid address ({})", address, port,
                    ::gai_strerror(status));
  }
  return {found, &::freeaddrinfo};
}

Descriptor socket_for(const addrinfo& address) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

class SocketStream final : public ByteStream {
 public:
  SocketStream(Descriptor socket, bool writes) : socket_(std::move(socket)), writes_(writes) {}

  size_t write(std::span<const std::byte> bytes) override {
    return counted(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  size_t read(std::span<std::byte> bytes) override {
    const ssize_t count = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (count == 0 && !bytes.empty()) throw std::runtime_error("the rank closed it");
    return counted(count);
  }
  void wait(std::chrono::milliseconds limit) override {
    is_ready(socket_, writes_ ? POLLOUT : POLLIN,
             monotonic_seconds() + std::chrono::duration<double>(limit).count());
  }
  void close() override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  static size_t counted(ssize_t count) {
    if (count >= 0) return static_cast<size_t>(count);
    if (errno == EAGAIN || errno == EINTR) return 0;
    throw std::runtime_error(errno_text(errno));
  }

  Descriptor socket_;
  bool writes_;
};

std::string random_word() {
  std::random_device device;
  std::string word;
  while (word.size() < Word().size()) word += fmt::format("{:08x}", device());
  return word;
}

class SocketStreamOffer final : public StreamOffer {
 public:
  explicit SocketStreamOffer(const std::string& address) : address_(address) {
    const Addresses resolved = resolve(address, "0");
    socket_ = socket_for(*resolved);
    if (::bind(socket_.get(), resolved->ai_addr, resolved->ai_addrlen) != 0 ||
        ::listen(socket_.get(), SOMAXCONN) != 0) {
      throw CommError("[comm.make_link] this rank cannot listen at {} ({})", address, errno_text(errno));
    }
  }

  std::string text() const override { return fmt::format("{} {} {}", address_, port(), word_); }

  std::unique_ptr<ByteStream> accept(double timeout_s) override {
    const double deadline = monotonic_seconds() + timeout_s;
    while (is_ready(socket_, POLLIN, deadline)) {
      Descriptor socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket && knows_the_word(socket)) {
        return std::make_unique<SocketStream>(std::move(socket), /*writes=*/false);
      }
    }
    throw CommError("[comm.make_link] nobody connected to {}:{} within {:g} s", address_, port(), timeout_s);
  }

 private:
  int port() const {
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&bound), &size);
    // sin_port and sin6_port have the same offset.
    return ntohs(reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  }

  bool knows_the_word(const Descriptor& socket) const {
    const double deadline = monotonic_seconds() + kGreeting_s;
    std::string said;
    Word part{};
    while (said.size() < word_.size() && is_ready(socket, POLLIN, deadline)) {
      const ssize_t count = ::recv(socket.get(), part.data(), word_.size() - said.size(), 0);
      if (count <= 0) break;
      said.append(part.data(), static_cast<size_t>(count));
    }
    return said == word_;
  }

  std::string address_;
  std::string word_ = random_word();
  Descriptor socket_;
};

/// Empty, or why there is no connection.
std::string connect(const Descriptor& socket, const addrinfo& address, double timeout_s) {
  const double deadline = monotonic_seconds() + timeout_s;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return {};
  if (errno != EINPROGRESS) return errno_text(errno);
  if (!is_ready(socket, POLLOUT, deadline)) return fmt::format("no answer within {:g} s", timeout_s);
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? std::string() : errno_text(error);
}

}  // namespace

std::unique_ptr<StreamOffer> offer_socket_stream(const std::string& address) {
  return std::make_unique<SocketStreamOffer>(address);
}

std::unique_ptr<ByteStream> open_socket_stream(const std::string& offer, double timeout_s) {
  std::string address, port, word;
  std::istringstream(offer) >> address >> port >> word;
  const Addresses resolved = resolve(address, port);
  Descriptor socket = socket_for(*resolved);
  const std::string error = connect(socket, *resolved, timeout_s);
  if (!error.empty()) {
    throw CommError(
        "[comm.make_link] no connection to {}:{} ({}); check that no firewall blocks the ranks' ports",
        address, port, error);
  }
  // A new connection always has room for these few bytes.
  if (::send(socket.get(), word.data(), word.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(word.size())) {
    throw CommError("[comm.make_link] {}:{} closed the connection", address, port);
  }
  return std::make_unique<SocketStream>(std::move(socket), /*writes=*/true);
}

}  // namespace trireme::comm
