#include "trireme/base/error.h"
#include "trireme/text/normal_form.h"

namespace trireme::text {

void require_normal_forms() {
  throw EnvironmentError(
      "[text.normal_form] this build has no Unicode normalisation, which the tokenizer asks for; install "
      "libutf8proc-dev and rebuild");
}

std::string normalize(std::string_view text, NormalForm) {
  require_normal_forms();
  return std::string(text);
}

size_t grapheme_length(std::string_view text) {
  require_normal_forms();
  return text.size();
}

}  // namespace trireme::text
