#pragma once
// Where a controller listens: a Unix socket in a folder of its user alone, or a port of this host with a
// token that only its user can read. Nothing listens beyond the host: that needs TLS, which is not there.
#include <cstdint>
#include <string>
#include <string_view>

#include "trireme/base/descriptor.h"
#include "trireme/base/env.h"
#include "trireme/controller/wire.h"

namespace trireme::controller {

inline constexpr int64_t kDefaultPort = 12345;

/// "unix:/path" or "tcp:127.0.0.1:PORT".
struct Address {
  std::string path = {};  ///< of a Unix socket; empty: TCP
  int64_t port = 0;       ///< of 127.0.0.1; 0: the kernel picks one
  bool is_unix() const { return !path.empty(); }
  std::string text() const;
  bool operator==(const Address&) const = default;
};

/// Throws ConfigError for anything else, and for hosts that are not this one.
Address parse_address(std::string_view text);

/// $XDG_RUNTIME_DIR/trireme, else /tmp/trireme-UID: made with mode 0700. Throws EnvironmentError when it
/// belongs to somebody else or others may look into it.
std::string runtime_folder(const Environment& environment);

/// The token of `port`: 32 bytes. Throws EnvironmentError when there is no such file (nobody listens there,
/// or another user does), or others may read it.
std::string read_token(const Environment& environment, int64_t port);

/// A socket that listens, with what belongs to it in the file system, which goes with it.
class Listener {
 public:
  /// Throws ConfigError for a port or path that is in use, EnvironmentError for a folder that others may
  /// enter.
  Listener(const Address& address, const Environment& environment);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener();

  int fd() const { return socket_.get(); }
  const Address& address() const { return address_; }
  /// The token of a port; empty for a Unix socket, whose peers the kernel names.
  const std::string& token() const { return token_; }
  /// The next connection; none when nobody waits, or a process of another user did.
  Descriptor accept() const;

 private:
  void listen_at_path();
  void listen_at_port(const Environment& environment);

  Address address_;
  Descriptor socket_;
  std::string token_, token_path_;
};

/// Connects, and proves to know the token where the address is a port, as the other side does. Throws
/// CommError: nobody listens there, no answer before the deadline, a wrong token.
Connection connect_to(const Address& address, const Environment& environment, const std::string& peer,
                      Connection::Clock::time_point deadline);

/// The listening side of the proof, a step for each frame. A Unix socket needs none.
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
