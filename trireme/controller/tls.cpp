#include "trireme/controller/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/controller/hmac.h"

namespace trireme::controller {
namespace {

struct FreeOpenSsl {
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
  void operator()(SSL_SESSION* session) const { ::SSL_SESSION_free(session); }
  void operator()(BIO_METHOD* method) const { ::BIO_meth_free(method); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, FreeOpenSsl>;

/// The one identity of a pre-shared key; which key it is, the two sides know from elsewhere.
constexpr std::string_view kIdentity = "trireme";

/// The reason of this thread's last error in OpenSSL's words.
std::string openssl_words() {
  const char* const reason = ::ERR_reason_error_string(::ERR_peek_last_error());
  return reason != nullptr ? reason : "no reason given";
}

[[noreturn]] void throw_unusable(const char* what) {
  throw EnvironmentError(
      "[controller.tls] OpenSSL refuses {}: {}; look at the file openssl.cnf of this machine", what,
      openssl_words());
}

/// The bytes below TLS: those of the socket, without SIGPIPE, and few before the peer is known.
class TlsSocket {
 public:
  TlsSocket(int fd, size_t most) : fd_(fd), left_(most) {}

  /// Any number may come from now on.
  void trust() { left_.reset(); }
  bool had_too_many() const { return had_too_many_; }
  bool had_plain_text() const { return had_plain_text_; }

  ssize_t receive(char* data, size_t size) {
    if (left_ == size_t{0}) {
      had_too_many_ = true;
      return 0;
    }
    const ssize_t got = ::recv(fd_, data, std::min(size, left_.value_or(size)), 0);
    if (got <= 0) return got;
    if (left_) *left_ -= static_cast<size_t>(got);
    // Each record of TLS begins with its kind.
    constexpr char kFirstKind = 0x14, kLastKind = 0x17;
    if (!std::exchange(has_begun_, true)) had_plain_text_ = data[0] < kFirstKind || data[0] > kLastKind;
    return had_plain_text_ ? 0 : got;
  }
  /// A peer that takes no more bytes may have sent some before, such as why: OpenSSL is told that all is
  /// well, since it would read nothing behind a write that failed, and the channel asks.
  ssize_t send(const char* data, size_t size) {
    const ssize_t sent = breaks_ ? -1 : ::send(fd_, data, size, MSG_NOSIGNAL);
    if (sent >= 0 || (!breaks_ && (errno == EAGAIN || errno == EINTR))) return sent;
    breaks_ = true;
    return static_cast<ssize_t>(size);
  }
  /// Whether a write has failed.
  bool breaks() const { return breaks_; }

  /// Reads what is there, for nobody; false: the peer has closed the connection.
  bool drain() {
    std::array<char, 4096> nowhere;
    const ssize_t got = ::recv(fd_, nowhere.data(), nowhere.size(), 0);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }

 private:
  int fd_;
  std::optional<size_t> left_;
  bool has_begun_ = false, had_plain_text_ = false, had_too_many_ = false, breaks_ = false;
};

TlsSocket& socket_of(BIO* bio) {
  return *static_cast<TlsSocket*>(::BIO_get_data(bio));
}

int read_bio(BIO* bio, char* data, int size) {
  ::BIO_clear_retry_flags(bio);
  const ssize_t got = socket_of(bio).receive(data, static_cast<size_t>(size));
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) ::BIO_set_retry_read(bio);
  return static_cast<int>(got);
}

int write_bio(BIO* bio, const char* data, int size) {
  ::BIO_clear_retry_flags(bio);
  const ssize_t sent = socket_of(bio).send(data, static_cast<size_t>(size));
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) ::BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}

/// OpenSSL flushes after each flight of a handshake; there is nothing to flush.
long control_bio(BIO*, int command, long, void*) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

BIO_METHOD* socket_method() {
  static const Owned<BIO_METHOD> method = [] {
    Owned<BIO_METHOD> made(::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "trireme socket"));
    ::BIO_meth_set_read(made.get(), read_bio);
    ::BIO_meth_set_write(made.get(), write_bio);
    ::BIO_meth_set_ctrl(made.get(), control_bio);
    return made;
  }();
  return method.get();
}

/// Whether `reason` is one of OpenSSL's for a peer without TLS 1.3.
bool is_of_version(int reason) {
  return reason == SSL_R_UNSUPPORTED_PROTOCOL || reason == SSL_R_WRONG_VERSION_NUMBER ||
         reason == SSL_R_TLSV1_ALERT_PROTOCOL_VERSION || reason == SSL_R_NO_PROTOCOLS_AVAILABLE;
}

/// Whether `reason` is one of OpenSSL's for two sides with different secrets.
bool is_of_secret(int reason) {
  return reason == SSL_R_BINDER_DOES_NOT_VERIFY || reason == SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER ||
         reason == SSL_R_TLSV1_ALERT_DECRYPT_ERROR;
}

/// Whether `reason` is one of OpenSSL's for a side with a token and one with certificates.
bool is_of_two_ways(int reason) {
  return reason == SSL_R_NO_SHARED_CIPHER || reason == SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE ||
         reason == SSL_R_NO_SUITABLE_SIGNATURE_ALGORITHM || reason == SSL_R_NO_SUITABLE_KEY_SHARE ||
         reason == SSL_R_TLSV13_ALERT_MISSING_EXTENSION;
}

/// Whether `reason` is the peer's word that this side's certificate is none for it.
bool is_refusal_of_certificate(int reason) {
  return reason == SSL_R_TLSV1_ALERT_UNKNOWN_CA || reason == SSL_R_SSLV3_ALERT_BAD_CERTIFICATE ||
         reason == SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN || reason == SSL_R_TLSV1_ALERT_ACCESS_DENIED ||
         reason == SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE;
}

std::string words_without_proof() {
  return "[controller.tls] one side proves who it is by a token, the other one by certificates or not at "
         "all; give both --token FILE, or both --cert, --key and --ca";
}

/// The fault of a handshake, in words for people.
std::string words_of(SSL* ssl, int reason) {
  if (is_of_version(reason)) {
    return "[controller.tls] the peer has no TLS 1.3, and no other version is taken; use one build of "
           "Trireme for all processes";
  }
  if (is_of_secret(reason)) {
    return "[controller.tls] the two sides have different tokens; copy the file of the server's --token to "
           "the other host, and name it there with --token FILE";
  }
  if (is_of_two_ways(reason)) return words_without_proof();
  if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
    return "[controller.tls] the peer showed no certificate, which this side wants; start it with --cert, "
           "--key and --ca";
  }
  if (reason == SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED) {
    return "[controller.tls] the peer wants a certificate; start this process with --cert, --key and --ca";
  }
  if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
    return fmt::format(
        "[controller.tls] the peer's certificate is refused: {}; it must be valid now, signed by an "
        "authority of this side's --ca, and for the name or address of --host",
        ::X509_verify_cert_error_string(::SSL_get_verify_result(ssl)));
  }
  if (reason == SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED) {
    return "[controller.tls] the peer refuses this side's certificate: it has expired; make a new one";
  }
  if (is_refusal_of_certificate(reason)) {
    return "[controller.tls] the peer refuses this side's certificate; it must be signed by an authority of "
           "the peer's --ca";
  }
  return fmt::format(
      "[controller.tls] TLS gives the connection up: {}; check that both sides are of one build of Trireme, "
      "and that nothing between them changes bytes",
      openssl_words());
}

class TlsChannel : public Channel {
 public:
  TlsChannel(Owned<SSL> ssl, std::shared_ptr<const void> keeps, int fd, size_t most, bool by_secret)
      : keeps_(std::move(keeps)), socket_(fd, most), by_secret_(by_secret), ssl_(std::move(ssl)) {
    BIO* const bio = ::BIO_new(socket_method());
    if (bio == nullptr) throw_unusable("a connection");
    ::BIO_set_data(bio, &socket_);
    ::BIO_set_init(bio, 1);
    ::SSL_set_bio(ssl_.get(), bio, bio);
  }

  Moved read(std::span<char> target) override {
    const std::lock_guard lock(mutex_);
    Moved moved;
    // One record at a time: what is left of a second one would lie here while poll() sees an empty socket.
    if (shake()) moved.bytes = take(SSL_read, target.data(), target.size(), reading_wants_);
    if (state_ == State::kFailed) return after_failure();
    moved.open = state_ != State::kClosed;
    return moved;
  }

  Moved write(std::string_view bytes) override {
    const std::lock_guard lock(mutex_);
    Moved moved;
    if (shake()) moved.bytes = take(SSL_write, bytes.data(), bytes.size(), writing_wants_);
    if (socket_.breaks()) return {.bytes = 0, .open = false};
    moved.open = state_ == State::kShaking || state_ == State::kOpen;
    return moved;
  }

  short read_events() const override { return events(reading_wants_); }
  short write_events() const override { return events(writing_wants_); }

  bool established() const override {
    const std::lock_guard lock(mutex_);
    return state_ == State::kOpen;
  }

 private:
  enum class State { kShaking, kOpen, kClosed, kFailed };

  short events(const short& wanted) const {
    const std::lock_guard lock(mutex_);
    return state_ == State::kShaking ? shaking_wants_ : wanted;
  }

  /// Goes on with the handshake; whether it is over, and bytes may pass.
  bool shake() {
    if (state_ != State::kShaking) return state_ == State::kOpen;
    ::ERR_clear_error();
    const int result = ::SSL_do_handshake(ssl_.get());
    if (result != 1) {
      take_error(result, shaking_wants_);
      return false;
    }
    if (by_secret_ && ::SSL_session_reused(ssl_.get()) != 1) {
      fail(words_without_proof());  // not reached: neither side has a certificate to show
      return false;
    }
    socket_.trust();
    state_ = State::kOpen;
    return true;
  }

  /// Bytes that SSL_read or SSL_write has moved.
  template <typename Function, typename Bytes>
  size_t take(Function* function, Bytes* bytes, size_t size, short& wants) {
    ::ERR_clear_error();
    const int count = function(ssl_.get(), bytes, static_cast<int>(std::min<size_t>(size, INT_MAX)));
    if (count > 0) return static_cast<size_t>(count);
    take_error(count, wants);
    return 0;
  }

  void take_error(int result, short& wants) {
    const int error = ::SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_WANT_READ) {
      wants = POLLIN;
      return;
    }
    if (error == SSL_ERROR_WANT_WRITE) {
      wants = POLLOUT;
      return;
    }
    if (socket_.had_plain_text()) {
      return fail(
          "[controller.tls] the peer speaks no TLS, and nothing else is taken beyond this host; check the "
          "address, and that it is a process of Trireme with a token or a certificate");
    }
    if (socket_.had_too_many()) {
      return fail(
          "[controller.tls] the peer sent too many bytes before it had proved who it is; use one build of "
          "Trireme for all processes, and short chains of certificates");
    }
    // The end of the bytes is that of the connection: frames are numbered, so a missing one is seen.
    reading_wants_ = POLLIN;
    if (error != SSL_ERROR_SSL) {
      state_ = State::kClosed;
      return;
    }
    const int reason = ERR_GET_REASON(::ERR_peek_error());
    const bool is_certificate = by_secret_ && reason == SSL_R_CERTIFICATE_VERIFY_FAILED;
    fail(is_certificate ? words_without_proof() : words_of(ssl_.get(), reason));
  }

  void fail(std::string why) {
    state_ = State::kFailed;
    failure_ = std::move(why);
  }

  /// The peer may still have to read why it was refused: its bytes are taken until it closes.
  Moved after_failure() {
    if (!std::exchange(has_said_, true)) throw CommError("{}", failure_);
    return {.bytes = 0, .open = socket_.drain()};
  }

  std::shared_ptr<const void> keeps_;  ///< what callbacks of ssl_ look at
  mutable std::mutex mutex_;
  TlsSocket socket_;
  bool by_secret_, has_said_ = false;
  Owned<SSL> ssl_;
  State state_ = State::kShaking;
  short shaking_wants_ = POLLIN, reading_wants_ = POLLIN, writing_wants_ = POLLOUT;
  std::string failure_;
};

Owned<SSL_CTX> new_context() {
  Owned<SSL_CTX> context(::SSL_CTX_new(::TLS_method()));
  // Named here, since what newer versions of OpenSSL would send by themselves is longer than strangers may
  // send.
  const bool is_set = context && ::SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION) == 1 &&
                      ::SSL_CTX_set_max_proto_version(context.get(), TLS1_3_VERSION) == 1 &&
                      ::SSL_CTX_set_ciphersuites(context.get(), "TLS_AES_128_GCM_SHA256") == 1 &&
                      ::SSL_CTX_set1_groups_list(context.get(), "X25519:P-256") == 1 &&
                      ::SSL_CTX_set_num_tickets(context.get(), 0) == 1;
  if (!is_set) throw_unusable("TLS 1.3 with TLS_AES_128_GCM_SHA256");
  ::SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET);
  ::SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                                        SSL_MODE_RELEASE_BUFFERS | SSL_MODE_NO_AUTO_CHAIN);
  return context;
}

/// The common part of both ways: a context, and channels of it.
class OpenSslTls : public Tls, public std::enable_shared_from_this<OpenSslTls> {
 public:
  OpenSslTls(size_t most, bool by_secret) : context_(new_context()), most_(most), by_secret_(by_secret) {}

  std::unique_ptr<Channel> accept(int fd) const override {
    Owned<SSL> ssl = new_ssl();
    ::SSL_set_accept_state(ssl.get());
    return channel(std::move(ssl), fd);
  }
  std::unique_ptr<Channel> connect(int fd, const std::string& host) const override {
    Owned<SSL> ssl = new_ssl();
    ::SSL_set_connect_state(ssl.get());
    // A listener that shows a certificate in place of the secret has one of no authority.
    by_secret_ ? ::SSL_set_verify(ssl.get(), SSL_VERIFY_PEER, nullptr) : expect_host(ssl.get(), host);
    return channel(std::move(ssl), fd);
  }

 protected:
  SSL_CTX* context() const { return context_.get(); }

 private:
  Owned<SSL> new_ssl() const {
    Owned<SSL> ssl(::SSL_new(context_.get()));
    if (!ssl) throw_unusable("a connection");
    return ssl;
  }
  std::unique_ptr<Channel> channel(Owned<SSL> ssl, int fd) const {
    return std::make_unique<TlsChannel>(std::move(ssl), shared_from_this(), fd, most_, by_secret_);
  }
  static void expect_host(SSL* ssl, const std::string& host) {
    X509_VERIFY_PARAM* const wanted = ::SSL_get0_param(ssl);
    ::X509_VERIFY_PARAM_set_hostflags(
        wanted, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
    if (::X509_VERIFY_PARAM_set1_ip_asc(wanted, host.c_str()) == 1) return;
    if (::X509_VERIFY_PARAM_set1_host(wanted, host.data(), host.size()) != 1)
      throw_unusable("the host's name");
  }

  Owned<SSL_CTX> context_;
  size_t most_;
  bool by_secret_;
};

/// A pre-shared key of RFC 8446, section 4.2.11, with a fresh Diffie-Hellman exchange in each handshake: a
/// secret that becomes known later opens no connection that was recorded.
class SecretTls : public OpenSslTls {
 public:
  explicit SecretTls(std::string_view secret)
      : OpenSslTls(kMostHandshakeBytes, /*by_secret=*/true),
        key_(hmac_sha256(secret, "trireme tls 1.3 external pre-shared key")) {
    SSL_CTX_set_app_data(context(), this);
    ::SSL_CTX_set_psk_find_session_callback(context(), find_session);
    ::SSL_CTX_set_psk_use_session_callback(context(), use_session);
  }

 private:
  static Owned<SSL_SESSION> session_of(SSL* ssl) {
    const auto* const self = static_cast<const SecretTls*>(SSL_CTX_get_app_data(::SSL_get_SSL_CTX(ssl)));
    constexpr std::array<unsigned char, 2> kAes128GcmSha256 = {0x13, 0x01};
    const SSL_CIPHER* const cipher = ::SSL_CIPHER_find(ssl, kAes128GcmSha256.data());
    Owned<SSL_SESSION> session(::SSL_SESSION_new());
    const auto* const key = reinterpret_cast<const unsigned char*>(self->key_.data());
    const bool is_made = session && cipher != nullptr &&
                         ::SSL_SESSION_set1_master_key(session.get(), key, self->key_.size()) == 1 &&
                         ::SSL_SESSION_set_cipher(session.get(), cipher) == 1 &&
                         ::SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) == 1;
    return is_made ? std::move(session) : nullptr;
  }

  static int find_session(SSL* ssl, const unsigned char* identity, size_t size, SSL_SESSION** found) {
    *found = nullptr;
    const bool is_ours = size == kIdentity.size() && std::memcmp(identity, kIdentity.data(), size) == 0;
    if (!is_ours) return 1;
    *found = session_of(ssl).release();
    return *found != nullptr ? 1 : 0;
  }

  static int use_session(SSL* ssl, const EVP_MD* hash, const unsigned char** identity, size_t* size,
                         SSL_SESSION** used) {
    *used = nullptr;
    if (hash != nullptr && EVP_MD_type(hash) != NID_sha256) return 1;  // a second hello, for another cipher
    *used = session_of(ssl).release();
    *identity = reinterpret_cast<const unsigned char*>(kIdentity.data());
    *size = kIdentity.size();
    return *used != nullptr ? 1 : 0;
  }

  std::string key_;
};

void check_key_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw ConfigError("[controller.tls] the private key {} cannot be read: {}; name its file with --key",
                      path, errno_text(errno));
  }
  if ((status.st_mode & 0077) == 0) return;
  throw ConfigError(
      "[controller.tls] the private key {} can be read by other users (mode {:o}); chmod 600 {}, and make a "
      "new key if others may have read it",
      path, status.st_mode & 07777, path);
}

/// A key that is locked by a password is refused: the terminal of a worker is nobody's.
int no_password(char*, int, int, void*) {
  return 0;
}

class CertificateTls : public OpenSslTls {
 public:
  explicit CertificateTls(const CertificateFiles& files)
      : OpenSslTls(kMostHandshakeBytesWithCertificates, /*by_secret=*/false) {
    check_key_file(files.key);
    ::ERR_clear_error();
    ::SSL_CTX_set_default_passwd_cb(context(), no_password);
    if (::SSL_CTX_use_certificate_chain_file(context(), files.certificate.c_str()) != 1) {
      throw ConfigError("[controller.tls] the certificate {} cannot be used: {}; name a PEM file with --cert",
                        files.certificate, openssl_words());
    }
    if (::SSL_CTX_use_PrivateKey_file(context(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
        ::SSL_CTX_check_private_key(context()) != 1) {
      throw ConfigError(
          "[controller.tls] the private key {} cannot be used with the certificate {}: {}; name the PEM file "
          "of its key, without a password, with --key",
          files.key, files.certificate, openssl_words());
    }
    if (::SSL_CTX_load_verify_locations(context(), files.authority.c_str(), nullptr) != 1) {
      throw ConfigError(
          "[controller.tls] the authority {} cannot be used: {}; name a PEM file of certificates with --ca",
          files.authority, openssl_words());
    }
    check_dates(files.certificate);
    ::SSL_CTX_set_verify(context(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }

 private:
  void check_dates(const std::string& path) const {
    const X509* const own = ::SSL_CTX_get0_certificate(context());
    const bool is_valid = ::X509_cmp_current_time(::X509_get0_notBefore(own)) < 0 &&
                          ::X509_cmp_current_time(::X509_get0_notAfter(own)) > 0;
    if (is_valid) return;
    throw ConfigError(
        "[controller.tls] the certificate {} is not valid today; make a new one, or set this machine's clock",
        path);
  }
};

}  // namespace

bool has_tls() {
  return true;
}

std::shared_ptr<const Tls> tls_by_secret(std::string_view secret) {
  return std::make_shared<SecretTls>(secret);
}

std::shared_ptr<const Tls> tls_by_certificates(const CertificateFiles& files) {
  return std::make_shared<CertificateTls>(files);
}

}  // namespace trireme::controller
