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
  std::string socket;  ///< of a Unix socket; empty: the port

  /// Throws ConfigError for a port that is none.
  controller::Address address() const;
};

/// Adds -p and --socket to `verb`, and returns them.
std::vector<CLI::Option*> add_server_address(CLI::App& verb, ServerAddress& address);

}  // namespace trireme::cli
