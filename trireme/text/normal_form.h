#pragma once
// Unicode's normal forms (Unicode Standard Annex 15) as Python's `tokenizers` has them, and grapheme
// clusters.
#include <cstddef>
#include <string>
#include <string_view>

namespace trireme::text {

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

/// Texts are well-formed UTF-8. A build without utf8proc throws EnvironmentError unless `text` is ASCII.
std::string normalize(std::string_view text, NormalForm form);

/// Bytes of the extended grapheme cluster that `text`, which is not empty, begins with (Annex 29).
size_t grapheme_length(std::string_view text);

/// Throws EnvironmentError in a build without utf8proc.
void require_normal_forms();

}  // namespace trireme::text
