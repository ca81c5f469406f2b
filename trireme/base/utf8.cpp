#include "trireme/base/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace trireme {
namespace {

/// First position at or after `begin` whose byte is not ASCII.
size_t skip_ascii(std::string_view text, size_t begin) {
  constexpr uint64_t kHighBits = 0x8080808080808080ULL;
  for (; begin + sizeof(uint64_t) <= text.size(); begin += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, text.data() + begin, sizeof word);
    if ((word & kHighBits) != 0) break;
  }
  while (begin < text.size() && static_cast<unsigned char>(text[begin]) < 0x80) ++begin;
  return begin;
}

bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

/// Length of the well-formed sequence that `text` starts with; 0: there is none. `text` starts with no ASCII.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  unsigned low = 0x80, high = 0xbf;  // range of the second byte
  if (lead == 0xe0) low = 0xa0;
  if (lead == 0xed) high = 0x9f;
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  return length;
}

/// C0 and DEL as one byte, C1 as the two of U+0080 to U+009F.
bool is_control(std::string_view character) {
  const auto lead = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return (lead < 0x20 && lead != '\n' && lead != '\t') || lead == 0x7f;
  return lead == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

}  // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = skip_ascii(text, 0); i < text.size(); i = skip_ascii(text, i)) {
    const size_t length = sequence_length(text.substr(i));
    if (length == 0) return false;
    i += length;
  }
  return true;
}

size_t character_begin(std::string_view text, size_t position) {
  constexpr size_t kMostContinuations = 3;
  size_t begin = position;
  while (begin < text.size() && begin > 0 && position - begin < kMostContinuations &&
         is_continuation(text[begin])) {
    --begin;
  }
  if (begin == position) return position;
  const size_t length = sequence_length(text.substr(begin));
  return begin + length > position ? begin : position;
}

std::string printable(std::string_view text) {
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const bool ascii = static_cast<unsigned char>(text[0]) < 0x80;
    const size_t length = ascii ? 1 : sequence_length(text);
    const std::string_view character = text.substr(0, std::max<size_t>(length, 1));
    if (length == 0) {
      shown += kReplacement;
    } else if (is_control(character)) {
      shown += '?';
    } else {
      shown += character;
    }
    text.remove_prefix(character.size());
  }
  return shown;
}

std::string printable_line(std::string_view text) {
  std::string shown = printable(text);
  std::ranges::replace_if(
      shown, [](char letter) { return letter == '\n' || letter == '\t'; }, '?');
  return shown;
}

}  // namespace trireme
