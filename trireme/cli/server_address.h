#pragma once
// Where the server of a controller is: the words of a command line about it.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/controller/address.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace trireme::cli {

struct ServerAddress {
  int64_t port = controller::kDefaultPort;
  std::string socket = {};  ///< of a Unix socket; empty: the port
  std::string host = "localhost";
  controller::CredentialFiles files = {};  ///< for a server beyond this host; none: variables may name them

  /// Throws ConfigError for a host or port that is none, and where a token or a certificate is named for this
  /// host, which needs none.
  controller::Address address() const;
};

/// Adds -p, --socket, --host and what other hosts need to `verb`, and returns them.
std::vector<CLI::Option*> add_server_address(CLI::App& verb, ServerAddress& address);

}  // namespace trireme::cli
