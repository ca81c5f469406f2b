#pragma once
// Code points in UTF-8, and the properties of them that tokenizers ask for. Texts are well-formed UTF-8; see
// replace_invalid() for those that may not be.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "trireme/text/unicode_tables.h"

namespace trireme::text {

/// A code point and its length in UTF-8, in bytes.
struct CodePoint {
  uint32_t value;
  size_t length;
};

/// The code point at `position`, which is less than the size of `text`.
CodePoint code_point_at(std::string_view text, size_t position);
/// The length in bytes of a character whose first byte is `lead`.
size_t character_length(char lead);
size_t count_characters(std::string_view text);
void append_utf8(std::string& text, uint32_t code);

/// `text` with U+FFFD for each maximal part of a character that is none, as Python's
/// bytes.decode(errors="replace") and Rust's from_utf8_lossy have it (Unicode 15, section 3.9).
std::string replace_invalid(std::string_view text);

/// Whether `code` is in one of the sorted `ranges`.
bool contains(std::span<const CodeRange> ranges, uint32_t code);
bool is_space(uint32_t code);
bool is_number(uint32_t code);
bool is_punctuation(uint32_t code);
/// As \w of Rust's `regex`: alphabetic, mark, decimal number, connector punctuation or join control.
bool is_word_character(uint32_t code);

/// Each character in its lower case, whatever stands around it (a final sigma is as any other).
std::string to_lower(std::string_view text);

/// A copy of `text` without what `drop(code)` says.
template <typename Drop>
std::string without(std::string_view text, Drop drop) {
  std::string kept;
  kept.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (!drop(point.value)) kept.append(text, i, point.length);
    i += point.length;
  }
  return kept;
}

}  // namespace trireme::text
