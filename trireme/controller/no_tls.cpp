// Stands in for tls.cpp in a build without OpenSSL: nothing leaves the host.
#include "trireme/base/error.h"
#include "trireme/controller/tls.h"

namespace trireme::controller {
namespace {

[[noreturn]] void throw_no_tls() {
  throw EnvironmentError(
      "[controller.tls] this build has no OpenSSL, so nothing can connect beyond this host; install "
      "libssl-dev and build again");
}

}  // namespace

bool has_tls() {
  return false;
}

std::shared_ptr<const Tls> tls_by_secret(std::string_view) {
  throw_no_tls();
}

std::shared_ptr<const Tls> tls_by_certificates(const CertificateFiles&) {
  throw_no_tls();
}

}  // namespace trireme::controller
