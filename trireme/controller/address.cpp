#include "trireme/controller/address.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hex.h"
#include "trireme/controller/hmac.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {
namespace {

constexpr int kConnectionsWaiting = 128;
constexpr size_t kTokenBytes = 32, kNonceBytes = 32;
constexpr int64_t kMostPort = 65535;

/// Throws EnvironmentError unless `path` is a folder of this user that nobody else may enter.
void check_private_folder(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    throw EnvironmentError(
        "[controller.address] the folder {} of the socket cannot be used: {}; create it with "
        "mode 0700",
        path, errno_text(errno));
  }
  const bool ours = S_ISDIR(status.st_mode) && status.st_uid == ::geteuid();
  if (ours && (status.st_mode & 0077) == 0) return;
  throw EnvironmentError(
      "[controller.address] {} is not a folder of this user alone (user {}, mode {:o}); remove "
      "it, or: chmod 700 {}",
      path, status.st_uid, status.st_mode & 07777, path);
}

void make_private_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw EnvironmentError(
        "[controller.address] cannot make the folder {}: {}; set XDG_RUNTIME_DIR to a folder of "
        "this user",
        path, errno_text(errno));
  }
  check_private_folder(path);
}

std::string token_file(const Environment& environment, int64_t port) {
  return fmt::format("{}/token-{}", runtime_folder(environment), port);
}

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    throw ConfigError(
        "[controller.address] the path {} of a socket has {} letters, {} fit; choose a shorter one", path,
        path.size(), sizeof address.sun_path - 1);
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

sockaddr_in loopback_address(int64_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

Descriptor stream_socket(int family) {
  Descriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw EnvironmentError(
        "[controller.address] cannot create a socket: {}; raise the open-file limit (ulimit -n)",
        errno_text(errno));
  }
  const int on = 1;
  if (family == AF_INET) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

/// 0, or the errno of connect(); a Unix socket whose queue is full says EAGAIN.
int try_connect(int fd, const Address& address) {
  const sockaddr_in port = loopback_address(address.port);
  const sockaddr_un path = address.is_unix() ? unix_address(address.path) : sockaddr_un{};
  const auto* const generic =
      address.is_unix() ? reinterpret_cast<const sockaddr*>(&path) : reinterpret_cast<const sockaddr*>(&port);
  const socklen_t size = address.is_unix() ? sizeof path : sizeof port;
  return ::connect(fd, generic, size) == 0 ? 0 : errno;
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

Descriptor connected(const Address& address, const std::string& peer,
                     Connection::Clock::time_point deadline) {
  while (true) {
    Descriptor socket = stream_socket(address.is_unix() ? AF_UNIX : AF_INET);
    int error = try_connect(socket.get(), address);
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      const bool ready = wait_for(socket.get(), POLLOUT, deadline);
      if (!ready || ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = ETIMEDOUT;
    }
    if (error == 0) return socket;
    if (error == EAGAIN && Connection::Clock::now() < deadline) {
      ::poll(nullptr, 0, 1);
      continue;
    }
    throw CommError(
        "[controller.connect] {} does not answer at {}: {}; start one with 'trireme serve -n WORKERS'", peer,
        address.text(), errno_text(error));
  }
}

/// Whether a file has the name of a socket that a program made for itself: its kind, and the number of its
/// process.
bool is_of_a_process(const std::string& name) {
  for (const std::string_view kind : {"session-", "train-"}) {
    const size_t digit = kind.size();
    if (name.starts_with(kind) && digit < name.size() && '0' <= name[digit] && name[digit] <= '9')
      return !name.ends_with('~');  // one that is about to listen
  }
  return false;
}

/// Removes what killed programs have left in `folder`: their sockets refuse whoever connects.
void remove_dead_sockets(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const bool is_ours = entry.is_socket(error) && is_of_a_process(entry.path().filename().string()) &&
                         entry.path().native().size() < sizeof sockaddr_un::sun_path;
    if (is_ours && try_connect(stream_socket(AF_UNIX).get(), {.path = entry.path()}) == ECONNREFUSED)
      ::unlink(entry.path().c_str());
  }
}

/// Roles are part of what is hashed: nobody gets a proof by sending a listener's own challenge back to it.
std::string proof_of(const std::string& token, const char* role, const std::string& first,
                     const std::string& second) {
  return hmac_sha256(token, fmt::format("trireme {} {}{}", role, first, second));
}

void prove(Connection& connection, const std::string& token, Connection::Clock::time_point deadline) {
  const auto challenge = message_of<Challenge>(connection.receive(deadline));
  const std::string nonce = random_bytes(kNonceBytes);
  send(connection, Proof{.nonce = nonce, .digest = proof_of(token, "connects", challenge.nonce, nonce)});
  const Frame answer = connection.receive(deadline);
  if (is<Reject>(answer)) throw CommError("{}", message_of<Reject>(answer).reason);
  const auto proof = message_of<Proof>(answer);
  if (equal_in_constant_time(proof.digest, proof_of(token, "listens", nonce, challenge.nonce))) return;
  throw CommError(
      "[controller.connect] {} does not know the token of its port: another program listens there; "
      "choose another port",
      connection.peer());
}

}  // namespace

std::string Address::text() const {
  return is_unix() ? "unix:" + path : fmt::format("tcp:127.0.0.1:{}", port);
}

Address parse_address(std::string_view text) {
  constexpr std::string_view kUnix = "unix:", kTcp = "tcp:";
  if (text.starts_with(kUnix) && text.size() > kUnix.size()) {
    const std::filesystem::path path = std::filesystem::absolute(text.substr(kUnix.size()));
    return {.path = path.lexically_normal().string()};
  }
  const size_t colon = text.rfind(':');
  if (!text.starts_with(kTcp) || colon < kTcp.size()) {
    throw ConfigError("[controller.address] '{}' is no address; write unix:/PATH or tcp:127.0.0.1:PORT",
                      text);
  }
  const std::string_view host = text.substr(kTcp.size(), colon - kTcp.size()),
                         digits = text.substr(colon + 1);
  if (host != "127.0.0.1" && host != "localhost") {
    throw ConfigError(
        "[controller.address] {} is beyond this host: connections there would need TLS, which Trireme "
        "does not have yet; use tcp:127.0.0.1:PORT, and an SSH tunnel from elsewhere",
        text);
  }
  Address address;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), address.port);
  const bool whole = read.ec == std::errc() && read.ptr == digits.data() + digits.size() && !digits.empty();
  if (whole && address.port >= 0 && address.port <= kMostPort) return address;
  throw ConfigError("[controller.address] '{}' is no port; write a number from 0 to {}", digits, kMostPort);
}

std::string runtime_folder(const Environment& environment) {
  const auto base = environment.get("XDG_RUNTIME_DIR");
  const std::string folder = base ? *base + "/trireme" : fmt::format("/tmp/trireme-{}", ::geteuid());
  make_private_folder(folder);
  return folder;
}

std::string read_token(const Environment& environment, int64_t port) {
  const std::string path = token_file(environment, port);
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    throw CommError(
        "[controller.connect] nothing of this user listens at port {}: there is no {}; start a server "
        "with 'trireme serve -n WORKERS -p {}'",
        port, path, port);
  }
  if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 0077) != 0) {
    throw EnvironmentError(
        "[controller.address] {} is not a file of this user alone (user {}, mode {:o}); remove it "
        "and start the server anew",
        path, status.st_uid, status.st_mode & 07777);
  }
  const auto token = from_hex(read_file(path));
  if (token && token->size() == kTokenBytes) return *token;
  throw EnvironmentError("[controller.address] {} holds no token; remove it and start the server anew", path);
}

Listener::Listener(const Address& address, const Environment& environment) : address_(address) {
  address.is_unix() ? listen_at_path() : listen_at_port(environment);
  if (::listen(socket_.get(), kConnectionsWaiting) != 0) {
    throw EnvironmentError("[controller.listen] cannot listen at {}: {}; choose another address",
                           address_.text(), errno_text(errno));
  }
}

void Listener::listen_at_path() {
  const std::string folder = std::filesystem::path(address_.path).parent_path().string();
  make_private_folder(folder);
  remove_dead_sockets(folder);
  // Whoever sees the socket may connect: it gets its name when it listens already.
  const std::string unfinished = address_.path + "~";
  const sockaddr_un name = unix_address(unfinished);
  if (try_connect(stream_socket(AF_UNIX).get(), address_) == ECONNREFUSED)
    ::unlink(address_.path.c_str());  // its server was killed
  ::unlink(unfinished.c_str());
  socket_ = stream_socket(AF_UNIX);
  const bool listens = ::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0 &&
                       ::listen(socket_.get(), kConnectionsWaiting) == 0 &&
                       ::link(unfinished.c_str(), address_.path.c_str()) == 0;
  const int error = errno;
  ::unlink(unfinished.c_str());
  if (listens) return;
  socket_.close();
  throw ConfigError(
      "[controller.listen] {} cannot be listened at: {}; a server may be running there (trireme ps), "
      "else choose another path",
      address_.text(), errno_text(error));
}

void Listener::listen_at_port(const Environment& environment) {
  socket_ = stream_socket(AF_INET);
  const int on = 1;
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in name = loopback_address(address_.port);
  socklen_t size = sizeof name;
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&name), size) != 0 ||
      ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    throw ConfigError(
        "[controller.listen] {} cannot be listened at: {}; a server may be running there (trireme ps), "
        "else choose another port with -p",
        address_.text(), errno_text(errno));
  }
  address_.port = ntohs(name.sin_port);
  token_ = random_bytes(kTokenBytes);
  const std::string path = token_file(environment, address_.port);
  ::unlink(path.c_str());  // of a server that was killed: the port is ours now
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) throw EnvironmentError("[controller.listen] cannot write {}: {}", path, errno_text(errno));
  const std::string hex = to_hex(token_.data(), token_.size());
  write_all(file.get(), hex.data(), hex.size(), path);
  token_path_ = path;
}

Listener::~Listener() {
  if (!socket_) return;
  if (address_.is_unix()) ::unlink(address_.path.c_str());
  if (!token_path_.empty()) ::unlink(token_path_.c_str());
}

Descriptor Listener::accept() const {
  Descriptor socket(::accept4(fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const int on = 1;
  if (socket && address_.is_unix() && !is_same_user(socket.get())) return {};
  if (socket && !address_.is_unix()) ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

Connection connect_to(const Address& address, const Environment& environment, const std::string& peer,
                      Connection::Clock::time_point deadline) {
  const std::string token = address.is_unix() ? "" : read_token(environment, address.port);
  Connection connection(connected(address, peer, deadline), fmt::format("{} at {}", peer, address.text()));
  if (address.is_unix() && !is_same_user(connection.fd())) {
    throw CommError("[controller.connect] {} is listened at by another user; choose another path",
                    address.text());
  }
  if (!address.is_unix()) prove(connection, token, deadline);
  return connection;
}

Gate::Gate(std::string token) : token_(std::move(token)), open_(token_.empty()) {}

void Gate::greet(Connection& connection) {
  if (open_) return;
  nonce_ = random_bytes(kNonceBytes);
  send(connection, Challenge{.nonce = nonce_});
}

void Gate::take(Connection& connection, const Frame& frame) {
  const auto proof = message_of<Proof>(frame);
  const bool long_enough = proof.nonce.size() == kNonceBytes;
  if (!long_enough ||
      !equal_in_constant_time(proof.digest, proof_of(token_, "connects", nonce_, proof.nonce))) {
    throw CommError(
        "[controller.connect] the token of this connection is wrong; a server that was started anew has "
        "another one");
  }
  send(connection, Proof{.nonce = {}, .digest = proof_of(token_, "listens", proof.nonce, nonce_)});
  open_ = true;
}

}  // namespace trireme::controller
