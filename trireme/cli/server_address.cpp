#include "trireme/cli/server_address.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "trireme/base/error.h"
#include "trireme/cli/front.h"

namespace trireme::cli {

controller::Address ServerAddress::address() const {
  const controller::Address named =
      socket.empty() ? controller::address_of(host, port) : controller::parse_address("unix:" + socket);
  if (!files.any() || named.is_beyond()) return named;
  throw ConfigError(
      "[cli.server] a token or a certificate is given for {}, which is of this host and takes none; name the "
      "address by which other hosts reach the server with --host",
      named.text());
}

std::vector<CLI::Option*> add_server_address(CLI::App& verb, ServerAddress& address) {
  CLI::Option* const port =
      verb.add_option("-p,--port", address.port, with_default("Port of the server; 0: any", address.port))
          ->option_text("PORT");
  CLI::Option* const socket =
      verb.add_option("--socket", address.socket,
                      "Unix socket instead of a port; its folder must be of this user alone")
          ->option_text("PATH")
          ->excludes(port);
  CLI::Option* const host =
      verb.add_option(
              "--host", address.host,
              "Host of the server, by the address at which other hosts reach it; what is not localhost "
              "needs --token, or --cert, --key and --ca (default: localhost)")
          ->option_text("HOST")
          ->excludes(socket);
  CLI::Option* const token =
      verb.add_option("--token", address.files.token,
                      "File of a secret that all processes of the server know, readable by its user alone "
                      "(default: $TRIREME_TOKEN_FILE)")
          ->option_text("FILE");
  CLI::Option* const certificate =
      verb.add_option("--cert", address.files.certificate,
                      "PEM file of this process's certificate (default: $TRIREME_CERT_FILE)")
          ->option_text("FILE")
          ->excludes(token);
  CLI::Option* const key =
      verb.add_option("--key", address.files.key, "PEM file of its private key (default: $TRIREME_KEY_FILE)")
          ->option_text("FILE")
          ->needs(certificate);
  CLI::Option* const authority =
      verb.add_option("--ca", address.files.authority,
                      "PEM file of the authority whose certificates are let in (default: $TRIREME_CA_FILE)")
          ->option_text("FILE")
          ->needs(certificate);
  certificate->needs(key)->needs(authority);
  return {port, socket, host, token, certificate, key, authority};
}

}  // namespace trireme::cli
