#include "trireme/text/unicode.h"

#include <algorithm>

#include "trireme/base/utf8.h"

namespace trireme::text {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

bool is_ascii_space(uint32_t code) {
  return code == ' ' || (code >= '\t' && code <= '\r');
}

bool is_ascii_letter_or_digit(uint32_t code) {
  return (code >= '0' && code <= '9') || ((code | 0x20) >= 'a' && (code | 0x20) <= 'z');
}

/// How many bytes at the start of `text`, which is no character, one U+FFFD stands for: the longest beginning
/// of a character, and at least one.
size_t maximal_part(std::string_view text) {
  const size_t whole = character_length(text[0]);
  for (size_t length = std::min(whole, text.size()); length > 1; --length) {
    // After the second byte any continuation byte will do, so one of them shows whether this is a beginning.
    std::string completed(text.substr(0, length));
    completed.resize(whole, '\x80');
    if (is_utf8(completed)) return length;
  }
  return 1;
}

void append_lower(std::string& lower, uint32_t code) {
  const auto run = std::upper_bound(kLowerRuns.begin(), kLowerRuns.end(), code,
                                    [](uint32_t value, const LowerRun& row) { return value < row.first; });
  if (code == 0x130) {
    lower += "i\xcc\x87";  // Rust's to_lowercase, as SpecialCasing.txt has it: i and U+0307
    return;
  }
  uint32_t result = code;
  if (run != kLowerRuns.begin()) {
    const LowerRun& row = *std::prev(run);
    if (code <= row.last && (code - row.first) % row.stride == 0) {
      result = static_cast<uint32_t>(static_cast<int32_t>(code) + row.change);
    }
  }
  append_utf8(lower, result);
}

}  // namespace

size_t character_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

CodePoint code_point_at(std::string_view text, size_t position) {
  const size_t length = character_length(text[position]);
  auto value = static_cast<uint32_t>(static_cast<unsigned char>(text[position]));
  if (length == 1) return {value, 1};
  value &= 0x7fu >> length;
  for (size_t i = 1; i < length && position + i < text.size(); ++i) {
    value = value << 6 | (static_cast<unsigned char>(text[position + i]) & 0x3fu);
  }
  return {value, length};
}

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xc0) != 0x80; }));
}

void append_utf8(std::string& text, uint32_t code) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += {static_cast<char>(0xc0 | code >> 6), tail(0)};
  } else if (code < 0x10000) {
    text += {static_cast<char>(0xe0 | code >> 12), tail(6), tail(0)};
  } else {
    text += {static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
  }
}

std::string replace_invalid(std::string_view text) {
  if (is_utf8(text)) return std::string(text);
  std::string valid;
  valid.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const std::string_view character = text.substr(i, character_length(text[i]));
    if (is_utf8(character)) {
      valid += character;
      i += character.size();
    } else {
      valid += kReplacement;
      i += maximal_part(text.substr(i));
    }
  }
  return valid;
}

bool contains(std::span<const CodeRange> ranges, uint32_t code) {
  const auto after = std::upper_bound(ranges.begin(), ranges.end(), code,
                                      [](uint32_t value, const CodeRange& row) { return value < row.first; });
  return after != ranges.begin() && code <= std::prev(after)->last;
}

bool is_space(uint32_t code) {
  return code < 0x80 ? is_ascii_space(code) : contains(kSpaces, code);
}

bool is_number(uint32_t code) {
  return contains(kNumbers, code);
}

bool is_punctuation(uint32_t code) {
  return contains(kPunctuation, code);
}

bool is_word_character(uint32_t code) {
  return code < 0x80 ? is_ascii_letter_or_digit(code) || code == '_' : contains(kWordCharacters, code);
}

std::string to_lower(std::string_view text) {
  std::string lower;
  lower.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    append_lower(lower, point.value);
    i += point.length;
  }
  return lower;
}

}  // namespace trireme::text
