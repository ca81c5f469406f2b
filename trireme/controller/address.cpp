#include "trireme/controller/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/controller/hmac.h"
#include "trireme/controller/messages.h"

namespace trireme::controller {
namespace {

constexpr int kConnectionsWaiting = 128;
constexpr size_t kNonceBytes = 32;
constexpr int64_t kMostPort = 65535;
constexpr size_t kMostHostName = 128;

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

/// A name of a socket, as the kernel has it.
struct SocketName {
  sockaddr_storage bytes{};
  socklen_t size = sizeof bytes;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  int family() const { return bytes.ss_family; }
  int64_t port() const {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(bytes);
    return ntohs(v4.sin_port);  // at the same place as that of IPv6
  }
  /// The host in numbers.
  std::string host() const {
    std::array<char, NI_MAXHOST> text{};
    const int status = ::getnameinfo(get(), size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
    return status == 0 ? text.data() : "an unknown host";
  }
};

template <typename Name>
SocketName socket_name(const Name& name) {
  SocketName made;
  std::memcpy(&made.bytes, &name, sizeof name);
  made.size = sizeof name;
  return made;
}

SocketName loopback_name(int64_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return socket_name(address);
}

/// The names of a host, which may have several. Throws ConfigError when it has none.
std::vector<SocketName> names_of_host(const Address& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status =
      ::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  if (status != 0) {
    throw ConfigError(
        "[controller.address] the host '{}' is not known here: {}; give a name that resolves on this host, "
        "or an address",
        address.host, ::gai_strerror(status));
  }
  std::vector<SocketName> names;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    names.emplace_back();
    std::memcpy(&names.back().bytes, one->ai_addr, one->ai_addrlen);
    names.back().size = one->ai_addrlen;
  }
  ::freeaddrinfo(found);
  return names;
}

std::vector<SocketName> names_of(const Address& address) {
  if (address.is_unix()) return {socket_name(unix_address(address.path))};
  if (!address.is_beyond()) return {loopback_name(address.port)};
  return names_of_host(address);
}

void send_at_once(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

Descriptor stream_socket(int family) {
  Descriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw EnvironmentError(
        "[controller.address] cannot create a socket: {}; raise the open-file limit (ulimit -n)",
        errno_text(errno));
  }
  if (family != AF_UNIX) send_at_once(socket.get());
  return socket;
}

/// 0, or the errno of connect(); a Unix socket whose queue is full says EAGAIN.
int try_connect(int fd, const SocketName& name) {
  return ::connect(fd, name.get(), name.size) == 0 ? 0 : errno;
}

int try_connect_path(const std::string& path) {
  return try_connect(stream_socket(AF_UNIX).get(), socket_name(unix_address(path)));
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

/// Connects to one of the names in its turn, each of which has its share of the time; the errno of the last,
/// 0 where one has answered.
int connect_to_one(const std::vector<SocketName>& names, Descriptor& socket,
                   Connection::Clock::time_point deadline) {
  int error = 0;
  auto left = std::ssize(names);
  for (const SocketName& name : names) {
    const auto now = Connection::Clock::now(), until = now + (deadline - now) / left--;
    socket = stream_socket(name.family());
    error = try_connect(socket.get(), name);
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      const bool ready = wait_for(socket.get(), POLLOUT, until);
      if (!ready || ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = ETIMEDOUT;
    }
    if (error == 0) break;
  }
  return error;
}

Descriptor connected(const Address& address, const std::string& peer,
                     Connection::Clock::time_point deadline) {
  const std::vector<SocketName> names = names_of(address);
  while (true) {
    Descriptor socket;
    const int error = connect_to_one(names, socket, deadline);
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

[[noreturn]] void throw_all_addresses(std::string_view host) {
  throw ConfigError(
      "[controller.address] {} stands for every address of a host; give the one by which the other hosts "
      "reach it",
      host);
}

/// Debian maps a host's own name to 127.0.1.1, where no other host reaches it.
void check_reachable(const Address& address, const SocketName& name) {
  const std::string host = name.host();
  constexpr std::string_view kMapped = "::ffff:";  // an address of version 4
  const std::string_view plain =
      std::string_view(host).substr(host.starts_with(kMapped) ? kMapped.size() : 0);
  if (plain == "0.0.0.0" || plain == "::") throw_all_addresses(address.host);
  const bool is_loopback = plain.starts_with("127.") || plain == "::1";
  if (!address.is_beyond() || !is_loopback || host == address.host) return;
  throw ConfigError(
      "[controller.listen] the host '{}' is {} here, where other hosts cannot reach it; give the address by "
      "which they do, as 'ip address' shows it",
      address.host, host);
}

/// Whether a file has the name of a socket that a program made for itself: its kind, and the number of its
/// process.
bool is_of_a_process(const std::string& name) {
  for (const std::string_view kind : {"session-", "train-", "data-"}) {
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
    if (is_ours && try_connect_path(entry.path()) == ECONNREFUSED) ::unlink(entry.path().c_str());
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
  if (is_unix()) return "unix:" + path;
  const bool is_v6 = host.find(':') != std::string::npos;
  return is_v6 ? fmt::format("tcp:[{}]:{}", host, port) : fmt::format("tcp:{}:{}", host, port);
}

Address address_of(std::string_view host, int64_t port) {
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  constexpr std::string_view kOfNames = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:";
  if (host.empty() || host.size() > kMostHostName || host.find_first_not_of(kOfNames) != host.npos) {
    throw ConfigError("[controller.address] '{}' is no host; give the name or the address of one", host);
  }
  if (host == "0.0.0.0" || host.find_first_not_of("0:") == host.npos) throw_all_addresses(host);
  if (port < 0 || port > kMostPort) {
    throw ConfigError("[controller.address] '{}' is no port; write a number from 0 to {}", port, kMostPort);
  }
  return {.path = {}, .port = port, .host = host == "localhost" ? kThisHost : std::string(host)};
}

Address parse_address(std::string_view text) {
  constexpr std::string_view kUnix = "unix:", kTcp = "tcp:";
  if (text.starts_with(kUnix) && text.size() > kUnix.size()) {
    const std::filesystem::path path = std::filesystem::absolute(text.substr(kUnix.size()));
    return {.path = path.lexically_normal().string()};
  }
  const size_t colon = text.rfind(':');
  if (!text.starts_with(kTcp) || colon < kTcp.size()) {
    throw ConfigError("[controller.address] '{}' is no address; write unix:/PATH or tcp:HOST:PORT", text);
  }
  const std::string_view host = text.substr(kTcp.size(), colon - kTcp.size()),
                         digits = text.substr(colon + 1);
  int64_t port = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  const bool whole = read.ec == std::errc() && read.ptr == digits.data() + digits.size() && !digits.empty();
  if (whole) return address_of(host, port);
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
  return read_token_file(
      path,
      fmt::format(
          "[controller.connect] nothing of this user listens at port {}: there is no {}; start a server "
          "with 'trireme serve -n WORKERS -p {}'",
          port, path, port));
}

Listener::Listener(const Address& address, const Environment& environment) : address_(address) {
  if (address.is_beyond()) tls_ = tls_of(environment, address.text());
  address.is_unix() ? listen_at_path() : listen_at_port();
  if (!address.is_unix() && !address.is_beyond()) make_token(environment);
  start_listening();
}

Listener::Listener(const Address& address, std::shared_ptr<const Tls> tls)
    : address_(address), tls_(std::move(tls)) {
  TRIREME_CHECK(address.is_beyond(), "[controller.listen] {} is of this host, and has no TLS",
                address.text());
  listen_at_port();
  start_listening();
}

void Listener::start_listening() const {
  if (::listen(socket_.get(), kConnectionsWaiting) == 0) return;
  throw EnvironmentError("[controller.listen] cannot listen at {}: {}; choose another address",
                         address_.text(), errno_text(errno));
}

void Listener::listen_at_path() {
  const std::string folder = std::filesystem::path(address_.path).parent_path().string();
  make_private_folder(folder);
  remove_dead_sockets(folder);
  // Whoever sees the socket may connect: it gets its name when it listens already.
  const std::string unfinished = address_.path + "~";
  const sockaddr_un name = unix_address(unfinished);
  if (try_connect_path(address_.path) == ECONNREFUSED)
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

void Listener::listen_at_port() {
  const SocketName name = names_of(address_).front();
  check_reachable(address_, name);
  socket_ = stream_socket(name.family());
  const int on = 1;
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  SocketName bound;
  if (::bind(socket_.get(), name.get(), name.size) != 0 ||
      ::getsockname(socket_.get(), bound.get(), &bound.size) != 0) {
    if (errno == EADDRNOTAVAIL) {
      throw ConfigError(
          "[controller.listen] {} is no address of this host, so nothing can be listened at there; give one "
          "of its own, as 'ip address' shows them",
          address_.text());
    }
    throw ConfigError(
        "[controller.listen] {} cannot be listened at: {}; a server may be running there (trireme ps), "
        "else choose another port with -p",
        address_.text(), errno_text(errno));
  }
  address_.port = bound.port();
}

void Listener::make_token(const Environment& environment) {
  const std::string path = token_file(environment, address_.port);
  ::unlink(path.c_str());  // of a server that was killed: the port is ours now
  token_ = make_token_file(path);
  token_path_ = path;
}

Listener::~Listener() {
  if (!socket_) return;
  if (address_.is_unix()) ::unlink(address_.path.c_str());
  if (!token_path_.empty()) ::unlink(token_path_.c_str());
}

std::optional<Connection> Listener::accept(const std::string& peer) const {
  SocketName from;
  Descriptor socket(::accept4(fd(), from.get(), &from.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket || (address_.is_unix() && !is_same_user(socket.get()))) return std::nullopt;
  if (!address_.is_unix()) send_at_once(socket.get());
  if (!tls_) return Connection(std::move(socket), peer);
  return Connection(std::move(socket), fmt::format("{} from {}", peer, from.host()),
                    [this](int fd) { return tls_->accept(fd); });
}

Connection connect_to(const Address& address, const Tls& tls, const std::string& peer,
                      Connection::Clock::time_point deadline) {
  TRIREME_CHECK(address.is_beyond(), "[controller.connect] {} is of this host, and has no TLS",
                address.text());
  Connection connection(connected(address, peer, deadline), fmt::format("{} at {}", peer, address.text()),
                        [&](int fd) { return tls.connect(fd, address.host); });
  connection.establish(deadline);
  return connection;
}

Connection connect_to(const Address& address, const Environment& environment, const std::string& peer,
                      Connection::Clock::time_point deadline) {
  if (address.is_beyond()) return connect_to(address, *tls_of(environment, address.text()), peer, deadline);
  const std::string token = address.is_unix() ? "" : read_token(environment, address.port);
  Connection connection(connected(address, peer, deadline), fmt::format("{} at {}", peer, address.text()));
  if (address.is_unix() && !is_same_user(connection.fd())) {
    throw CommError("[controller.connect] {} is listened at by another user; choose another path",
                    address.text());
  }
  if (!address.is_unix()) prove(connection, token, deadline);
  return connection;
}

std::string own_host(const Connection& connection) {
  SocketName own, peer;
  const bool has_names = ::getsockname(connection.fd(), own.get(), &own.size) == 0 &&
                         ::getpeername(connection.fd(), peer.get(), &peer.size) == 0;
  TRIREME_CHECK(has_names && own.family() != AF_UNIX,
                "[controller.connect] the connection to {} has no address of a host", connection.peer());
  // What leaves by 127.0.0.1 stays on this host, and the peer's address is one of its own.
  return own.host() == kThisHost ? peer.host() : own.host();
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
