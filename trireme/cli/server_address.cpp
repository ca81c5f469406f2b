#include "trireme/cli/server_address.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "trireme/cli/front.h"

namespace trireme::cli {

controller::Address ServerAddress::address() const {
  return controller::parse_address(socket.empty() ? fmt::format("tcp:127.0.0.1:{}", port) : "unix:" + socket);
}

std::vector<CLI::Option*> add_server_address(CLI::App& verb, ServerAddress& address) {
  CLI::Option* const port =
      verb.add_option("-p,--port", address.port, with_default("Port of this host; 0: any", address.port))
          ->option_text("PORT");
  CLI::Option* const socket =
      verb.add_option("--socket", address.socket,
                      "Unix socket instead of a port; its folder must be of this user alone")
          ->option_text("PATH")
          ->excludes(port);
  return {port, socket};
}

}  // namespace trireme::cli
