#include "tests/controller/certificates.h"

#include <fmt/format.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <cstdio>
#include <stdexcept>

namespace trireme::controller::test {
namespace {

constexpr long kDay_s = 86'400;

struct FreeOpenSsl {
  void operator()(EVP_PKEY* key) const { ::EVP_PKEY_free(key); }
  void operator()(X509* certificate) const { ::X509_free(certificate); }
  void operator()(EVP_PKEY_CTX* context) const { ::EVP_PKEY_CTX_free(context); }
  void operator()(X509_EXTENSION* extension) const { ::X509_EXTENSION_free(extension); }
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, FreeOpenSsl>;

void must(bool is_done, const char* what) {
  if (!is_done) throw std::runtime_error(fmt::format("OpenSSL cannot {}", what));
}

Owned<EVP_PKEY> new_key() {
  const Owned<EVP_PKEY_CTX> context(::EVP_PKEY_CTX_new_id(EVP_PKEY_EC, nullptr));
  EVP_PKEY* key = nullptr;
  must(::EVP_PKEY_keygen_init(context.get()) == 1 &&
           ::EVP_PKEY_CTX_set_ec_paramgen_curve_nid(context.get(), NID_X9_62_prime256v1) == 1 &&
           ::EVP_PKEY_keygen(context.get(), &key) == 1,
       "make a key");
  return Owned<EVP_PKEY>(key);
}

void extend(X509* certificate, int kind, const std::string& value) {
  const Owned<X509_EXTENSION> extension(::X509V3_EXT_conf_nid(nullptr, nullptr, kind, value.c_str()));
  must(extension && ::X509_add_ext(certificate, extension.get(), -1) == 1, "extend a certificate");
}

Owned<X509> new_certificate(EVP_PKEY* key, const std::string& name, long days, long number) {
  Owned<X509> made(::X509_new());
  must(::X509_set_version(made.get(), 2) == 1 && ::X509_set_pubkey(made.get(), key) == 1,
       "make a certificate");
  ::ASN1_INTEGER_set(::X509_get_serialNumber(made.get()), number);
  ::X509_gmtime_adj(::X509_getm_notBefore(made.get()), -kDay_s);
  ::X509_gmtime_adj(::X509_getm_notAfter(made.get()), days * kDay_s - kDay_s / 2);
  const auto* const text = reinterpret_cast<const unsigned char*>(name.c_str());
  ::X509_NAME_add_entry_by_txt(::X509_get_subject_name(made.get()), "CN", MBSTRING_ASC, text, -1, -1, 0);
  return made;
}

template <typename Write>
void write_pem(const std::string& path, const Write& write) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  must(file != nullptr && write(file) == 1, "write a file");
  std::fclose(file);
  ::chmod(path.c_str(), 0600);
}

}  // namespace

struct Authority::Keys {
  Owned<EVP_PKEY> key;
  Owned<X509> certificate;
};

Authority::Authority(const std::string& folder, const std::string& name)
    : folder_(folder), name_(name), keys_(std::make_unique<Keys>()) {
  keys_->key = new_key();
  keys_->certificate = new_certificate(keys_->key.get(), name, 3, 1);
  X509* const own = keys_->certificate.get();
  ::X509_set_issuer_name(own, ::X509_get_subject_name(own));
  extend(own, NID_basic_constraints, "critical,CA:TRUE");
  must(::X509_sign(own, keys_->key.get(), ::EVP_sha256()) > 0, "sign a certificate");
  write_pem(folder_ + "/" + name_ + ".pem", [&](std::FILE* file) { return ::PEM_write_X509(file, own); });
}

Authority::~Authority() = default;

CertificateFiles Authority::issue(const std::string& host, int days) {
  const std::string base = fmt::format("{}/{}-{}", folder_, name_, ++issued_);
  const CertificateFiles files{
      .certificate = base + ".pem", .key = base + ".key", .authority = folder_ + "/" + name_ + ".pem"};
  const Owned<EVP_PKEY> key = new_key();
  const Owned<X509> made = new_certificate(key.get(), "a process", days, issued_ + 1);
  ::X509_set_issuer_name(made.get(), ::X509_get_subject_name(keys_->certificate.get()));
  const bool is_address = host.find_first_not_of("0123456789.") == std::string::npos;
  extend(made.get(), NID_subject_alt_name, (is_address ? "IP:" : "DNS:") + host);
  must(::X509_sign(made.get(), keys_->key.get(), ::EVP_sha256()) > 0, "sign a certificate");
  write_pem(files.certificate, [&](std::FILE* file) { return ::PEM_write_X509(file, made.get()); });
  write_pem(files.key, [&](std::FILE* file) {
    return ::PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  return files;
}

namespace {

std::string refusal_of(SSL_CTX* context, int fd) {
  const Owned<SSL> ssl(::SSL_new(context));
  ::SSL_set_fd(ssl.get(), fd);
  ::ERR_clear_error();
  char byte = 0;
  if (::SSL_connect(ssl.get()) == 1 && ::SSL_read(ssl.get(), &byte, 1) == 1) return "";
  const char* const reason = ::ERR_reason_error_string(::ERR_peek_error());
  return reason != nullptr ? reason : "closed";
}

}  // namespace

std::string refusal_of_old_tls(int fd) {
  const Owned<SSL_CTX> context(::SSL_CTX_new(::TLS_client_method()));
  ::SSL_CTX_set_max_proto_version(context.get(), TLS1_2_VERSION);
  return refusal_of(context.get(), fd);
}

std::string refusal_with_certificate(int fd, const CertificateFiles& files) {
  const Owned<SSL_CTX> context(::SSL_CTX_new(::TLS_client_method()));
  if (!files.certificate.empty()) {
    ::SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str());
    ::SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM);
  }
  return refusal_of(context.get(), fd);
}

}  // namespace trireme::controller::test
