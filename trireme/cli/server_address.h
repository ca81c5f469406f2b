#pragma once
// Where the server of a controller is: the words of a command line about it.
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/controller/address.h"

namespace CLI {
class App;
}  // namespace CLI

namespace trireme::cli {

struct ServerAddress {
  int64_t port = controller::kDefaultPort;
  std::string socket;  ///< of a Unix socket; empty: the port

  /// Throws ConfigError for a port that is none.
  controller::Address address() const;
};

/// Adds -p and --socket to `verb`.
void add_server_address(CLI::App& verb, ServerAddress& address);

}  // namespace trireme::cli
