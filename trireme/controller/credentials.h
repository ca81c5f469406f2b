#pragma once
// By what a process proves beyond its host who it is, and wants others to: the file of a token, or those of a
// certificate, as variables name them.
#include <memory>
#include <string>

#include "trireme/base/env.h"
#include "trireme/controller/tls.h"

namespace trireme::controller {

/// Names of variables that name files.
inline constexpr const char* kTokenVariable = "TRIREME_TOKEN_FILE";
inline constexpr const char* kCertificateVariable = "TRIREME_CERT_FILE";
inline constexpr const char* kKeyVariable = "TRIREME_KEY_FILE";
inline constexpr const char* kAuthorityVariable = "TRIREME_CA_FILE";

/// Files that an option names, each under its variable; empty: no option does.
struct CredentialFiles {
  std::string token = {}, certificate = {}, key = {}, authority = {};

  bool any() const { return !token.empty() || !certificate.empty() || !key.empty() || !authority.empty(); }
  /// Names them in `environment`, by their absolute paths and instead of all that it names, if there are any.
  void put_into(Environment& environment) const;
};

inline constexpr size_t kTokenBytes = 32;

/// The token in the file `path`: 32 bytes, written as 64 hex digits. Throws EnvironmentError when the file is
/// none of this user alone, or holds no token; CommError that says `missing` when there is none.
std::string read_token_file(const std::string& path, const std::string& missing);

/// Writes a new token to `path`, readable by this user alone. Throws EnvironmentError, also where the file is
/// there already.
std::string make_token_file(const std::string& path);

/// Proves who this process is by the token or the certificate that `environment` names. Throws ConfigError
/// where it names neither, both, or a certificate in part; `where`: the address, for its message. Throws also
/// as read_token_file() and tls_by_certificates() do.
std::shared_ptr<const Tls> tls_of(const Environment& environment, const std::string& where);

}  // namespace trireme::controller
