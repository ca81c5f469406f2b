#include "trireme/base/error.h"
#include "trireme/text/regex.h"

namespace trireme::text {
namespace {

[[noreturn]] void refuse_regex() {
  throw EnvironmentError(
      "[text.regex] this build has no regular expressions, which the tokenizer asks for; install "
      "libpcre2-dev and rebuild");
}

}  // namespace

Regex::Regex(std::string_view) {
  refuse_regex();
}

void Regex::find_all(std::string_view, std::vector<Span>&) const {
  refuse_regex();
}

}  // namespace trireme::text
