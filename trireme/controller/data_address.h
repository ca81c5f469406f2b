#pragma once
// Where the client reaches a worker for bulk bytes: a Unix socket, or beyond one host an address and a secret
// of this worker alone, which both have got over connections that prove who is there.
#include <string>
#include <string_view>

#include "trireme/controller/address.h"

namespace trireme::controller {

struct DataAddress {
  Address address;
  std::string secret = {};  ///< of an address beyond this host

  /// "unix:/path", or "tcp:HOST:PORT?SECRET" with hex digits.
  std::string text() const;
};

/// Throws CommError for a text that DataAddress::text() does not write.
DataAddress parse_data_address(std::string_view text);

/// The text without its secret, for people and observers.
std::string without_secret(std::string_view text);

}  // namespace trireme::controller
