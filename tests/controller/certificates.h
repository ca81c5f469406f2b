#pragma once
// Certificates for tests: an authority that signs them for a name and a time.
#include <memory>
#include <string>

#include "trireme/controller/tls.h"

namespace trireme::controller::test {

class Authority {
 public:
  /// Its own certificate lies in `folder`.
  Authority(const std::string& folder, const std::string& name);
  ~Authority();

  /// The files of a certificate for `host`, a name or an address of IPv4, valid from yesterday to so many
  /// days from now.
  CertificateFiles issue(const std::string& host, int days = 2);

 private:
  struct Keys;
  std::string folder_, name_;
  std::unique_ptr<Keys> keys_;
  int issued_ = 0;
};

/// The words of OpenSSL's TLS 1.2 when it connects to `fd`; empty: it gets in.
std::string refusal_of_old_tls(int fd);

/// The words of OpenSSL's TLS 1.3 with a certificate, whatever its date; without files with none.
std::string refusal_with_certificate(int fd, const CertificateFiles& files);

}  // namespace trireme::controller::test
