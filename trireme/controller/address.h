#pragma once
// Where a controller listens: a Unix socket in a folder of its user alone, a port of this host with a token
// that only its user can read, or an address that other hosts reach, by TLS alone.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "trireme/base/descriptor.h"
#include "trireme/base/env.h"
#include "trireme/controller/credentials.h"
#include "trireme/controller/wire.h"

namespace trireme::controller {

inline constexpr int64_t kDefaultPort = 12345;
inline constexpr const char* kThisHost = "127.0.0.1";

/// "unix:/path", "tcp:127.0.0.1:PORT" or "tcp:HOST:PORT", with brackets around a HOST that is an address of
/// IPv6.
struct Address {
  std::string path = {};         ///< of a Unix socket; empty: TCP
  int64_t port = 0;              ///< 0: the kernel picks one
  std::string host = kThisHost;  ///< a name or an address, without brackets
  bool is_unix() const { return !path.empty(); }
  /// Whether connections need TLS.
  bool is_beyond() const { return !is_unix() && host != kThisHost; }
  std::string text() const;
  bool operator==(const Address&) const = default;
};

/// Throws ConfigError for anything else. "localhost" is 127.0.0.1; an address that stands for all addresses
/// of a host, such as 0.0.0.0, is none.
Address parse_address(std::string_view text);
/// Likewise of TCP alone; `host` may be in brackets.
Address address_of(std::string_view host, int64_t port);

/// $XDG_RUNTIME_DIR/trireme, else /tmp/trireme-UID: made with mode 0700. Throws EnvironmentError when it
/// belongs to somebody else or others may look into it.
std::string runtime_folder(const Environment& environment);

/// The token of `port`: 32 bytes. Throws EnvironmentError when there is no such file (nobody listens there,
/// or another user does), or others may read it.
std::string read_token(const Environment& environment, int64_t port);

/// A socket that listens, with what belongs to it in the file system, which goes with it.
class Listener {
 public:
  /// Throws ConfigError for a port or path that is in use or beyond this host without what tls_of() needs,
  /// EnvironmentError for a folder that others may enter.
  Listener(const Address& address, const Environment& environment);
  /// At an address that other hosts reach, to peers that `tls` lets in.
  Listener(const Address& address, std::shared_ptr<const Tls> tls);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener();

  int fd() const { return socket_.get(); }
  const Address& address() const { return address_; }
  /// The token of a port of this host; empty for a Unix socket, whose peers the kernel names, and beyond this
  /// host, where the connection itself proves it.
  const std::string& token() const { return token_; }
  /// The next connection, of what messages are to call `peer`; none when nobody waits, or a process of
  /// another user did. One from beyond this host gives no frame before the peer has proved who it is.
  std::optional<Connection> accept(const std::string& peer) const;

 private:
  void listen_at_path();
  void listen_at_port();
  void make_token(const Environment& environment);
  void start_listening() const;

  Address address_;
  std::shared_ptr<const Tls> tls_;  ///< beyond this host
  Descriptor socket_;
  std::string token_, token_path_;
};

/// Connects, and proves to know the token where the address is a port, as the other side does; beyond this
/// host as tls_of() says. Throws CommError: nobody listens there, no answer before the deadline, a wrong
/// token or certificate; ConfigError: the name of the host is not known here.
Connection connect_to(const Address& address, const Environment& environment, const std::string& peer,
                      Connection::Clock::time_point deadline);
/// Connects to an address that other hosts reach.
Connection connect_to(const Address& address, const Tls& tls, const std::string& peer,
                      Connection::Clock::time_point deadline);

/// The address in numbers by which `connection` leaves this host.
std::string own_host(const Connection& connection);

/// The listening side of the proof, a step for each frame. A Unix socket needs none, and TLS is one itself.
class Gate {
 public:
  /// An empty token: the gate is open.
  explicit Gate(std::string token);
  bool open() const { return open_; }
  /// Sends the challenge, if there is one.
  void greet(Connection& connection);
  /// Throws CommError when the frame proves nothing.
  void take(Connection& connection, const Frame& frame);

 private:
  std::string token_, nonce_;
  bool open_ = false;
};

}  // namespace trireme::controller
