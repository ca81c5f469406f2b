#include "trireme/controller/data_address.h"

#include "trireme/base/error.h"
#include "trireme/base/hex.h"

namespace trireme::controller {
namespace {

/// The place at which the secret begins; the path of a Unix socket may have any letter.
size_t end_of_address(std::string_view text) {
  return text.starts_with("tcp:") ? text.find('?') : std::string_view::npos;
}

}  // namespace

std::string DataAddress::text() const {
  if (secret.empty()) return address.text();
  return fmt::format("{}?{}", address.text(), to_hex(secret.data(), secret.size()));
}

DataAddress parse_data_address(std::string_view text) {
  const size_t end = end_of_address(text);
  DataAddress made{.address = parse_address(text.substr(0, end))};
  if (end != text.npos) made.secret = from_hex(text.substr(end + 1)).value_or("");
  if (made.address.is_beyond() == (made.secret.size() == kTokenBytes)) return made;
  throw CommError(
      "[controller.data] the worker at {} named no secret for its data; use one build of Trireme for all "
      "processes",
      made.address.text());
}

std::string without_secret(std::string_view text) {
  return std::string(text.substr(0, end_of_address(text)));
}

}  // namespace trireme::controller
