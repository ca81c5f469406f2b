#include "trireme/text/sentencepiece_normalizer.h"

#include <algorithm>

#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr std::string_view kEscapedSpace = "\xe2\x96\x81";  // U+2581

void append_escaped(std::string& result, std::string_view text) {
  for (const char byte : text) {
    if (byte == ' ') {
      result += kEscapedSpace;
    } else {
      result += byte;
    }
  }
}

}  // namespace

/// The text that `text` begins with, and what stands for it.
Charsmap::Entry SentencePieceNormalizer::first(std::string_view text) const {
  if (const size_t length = kept.longest_prefix(text)) return {length, text.substr(0, length)};
  if (const auto entry = charsmap.longest(text)) return *entry;
  const size_t length = std::min(character_length(text[0]), text.size());  // an entry may end in a character
  return {length, text.substr(0, length)};
}

std::string_view SentencePieceNormalizer::without_spaces_at_begin(std::string_view text) const {
  while (!text.empty()) {
    const Charsmap::Entry entry = first(text);
    if (entry.replacement != " ") break;
    text.remove_prefix(entry.length);
  }
  return text;
}

/// The space in front is there, too, where replacements leave nothing of a text; where spaces at the end go,
/// so does it. Spaces that one replacement makes stay together, as they do in SentencePiece.
std::string SentencePieceNormalizer::apply(std::string_view text) const {
  if (remove_extra_whitespaces) text = without_spaces_at_begin(text);
  if (text.empty()) return {};
  std::string result(add_dummy_prefix ? kEscapedSpace : "");
  bool after_space = remove_extra_whitespaces;
  while (!text.empty()) {
    const Charsmap::Entry entry = first(text);
    text.remove_prefix(entry.length);
    std::string_view shown = entry.replacement;
    while (after_space && shown.starts_with(' ')) shown.remove_prefix(1);
    append_escaped(result, shown);
    if (!shown.empty()) after_space = remove_extra_whitespaces && shown.ends_with(' ');
  }
  while (remove_extra_whitespaces && result.ends_with(kEscapedSpace))
    result.resize(result.size() - kEscapedSpace.size());
  return result;
}

}  // namespace trireme::text
