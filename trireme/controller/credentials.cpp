#include "trireme/controller/credentials.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hex.h"
#include "trireme/controller/hmac.h"

namespace trireme::controller {

void CredentialFiles::put_into(Environment& environment) const {
  if (!any()) return;
  const std::pair<const char*, const std::string&> files[] = {{kTokenVariable, token},
                                                              {kCertificateVariable, certificate},
                                                              {kKeyVariable, key},
                                                              {kAuthorityVariable, authority}};
  for (const auto& [variable, file] : files) {
    environment.unset(variable);
    // Workers may have working directories of their own.
    if (!file.empty()) environment.set(variable, std::filesystem::absolute(file).lexically_normal().string());
  }
}

std::string read_token_file(const std::string& path, const std::string& missing) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) throw CommError("{}", missing);
  if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 0077) != 0) {
    throw EnvironmentError(
        "[controller.address] {} is not a file of this user alone ({}user {}, mode {:o}); make it one: chmod "
        "600, "
        "chown, and no link",
        path, S_ISLNK(status.st_mode) ? "a link, " : "", status.st_uid, status.st_mode & 07777);
  }
  std::string text = read_file(path);
  if (text.ends_with('\n')) text.pop_back();
  const auto token = from_hex(text);
  if (token && token->size() == kTokenBytes) return *token;
  throw EnvironmentError(
      "[controller.address] {} holds no token, which is {} hexadecimal digits; copy the server's file", path,
      2 * kTokenBytes);
}

std::string make_token_file(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) {
    throw EnvironmentError(
        "[controller.listen] cannot write the token {}: {}; name a file in a folder of this user", path,
        errno_text(errno));
  }
  std::string token = random_bytes(kTokenBytes);
  const std::string hex = to_hex(token.data(), token.size());
  write_all(file.get(), hex.data(), hex.size(), path);
  return token;
}

std::shared_ptr<const Tls> tls_of(const Environment& environment, const std::string& where) {
  const auto token = environment.get(kTokenVariable), certificate = environment.get(kCertificateVariable),
             key = environment.get(kKeyVariable), authority = environment.get(kAuthorityVariable);
  const bool has_some = certificate || key || authority, has_all = certificate && key && authority;
  if (token && has_some) {
    throw ConfigError(
        "[controller.tls] both a token ({}) and a certificate are named for {}; give --token FILE alone, or "
        "--cert, --key and --ca alone",
        *token, where);
  }
  if (has_all)
    return tls_by_certificates({.certificate = *certificate, .key = *key, .authority = *authority});
  if (has_some) {
    throw ConfigError(
        "[controller.tls] {} is beyond this host, and of a certificate, its key and its authority only some "
        "are named; give all of --cert, --key and --ca",
        where);
  }
  if (!token) {
    throw ConfigError(
        "[controller.tls] {} is beyond this host, where only a token or a certificate opens a connection; "
        "give --token FILE, or --cert, --key and --ca, on both sides",
        where);
  }
  return tls_by_secret(read_token_file(
      *token,
      fmt::format("[controller.tls] there is no token {}; copy the server's there, with mode 0600", *token)));
}

}  // namespace trireme::controller
