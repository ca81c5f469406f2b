#pragma once
// TLS 1.3 over a connected socket, in which both sides prove who they are: by a secret that both know, or by
// certificates of one authority. tls.cpp has OpenSSL; no_tls.cpp stands in for it in a build without.
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "trireme/controller/channel.h"

namespace trireme::controller {

/// Whether this build has TLS.
bool has_tls();

/// Bytes that a side takes before the other one has proved who it is: a handshake by a secret is shorter.
inline constexpr size_t kMostHandshakeBytes = 1 << 10;
/// Likewise where certificates are sent.
inline constexpr size_t kMostHandshakeBytesWithCertificates = 16 << 10;

/// A way to prove who one is, for any number of connections. Channels keep what they need of it.
class Tls {
 public:
  virtual ~Tls() = default;
  /// The listening side of a connection. `fd` must outlive the channel.
  virtual std::unique_ptr<Channel> accept(int fd) const = 0;
  /// The connecting side; where certificates prove it, that of the peer must be for `host`.
  virtual std::unique_ptr<Channel> connect(int fd, const std::string& host) const = 0;
};

/// Both sides know `secret`, of 32 bytes. Throws EnvironmentError in a build without OpenSSL.
std::shared_ptr<const Tls> tls_by_secret(std::string_view secret);

/// PEM files: this process's certificate, with those between it and the authority, its private key, and the
/// authorities whose certificates are trusted.
struct CertificateFiles {
  std::string certificate, key, authority;
};

/// Both sides have a certificate of an authority that the other one trusts. Throws ConfigError for files that
/// cannot be read or do not belong together, a key that other users may read, and a certificate that is not
/// valid now; EnvironmentError in a build without OpenSSL.
std::shared_ptr<const Tls> tls_by_certificates(const CertificateFiles& files);

}  // namespace trireme::controller
