#include "trireme/text/normal_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "trireme/base/error.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

utf8proc_option_t options_of(NormalForm form) {
  switch (form) {
    case NormalForm::kNfc:
      return UTF8PROC_COMPOSE;
    case NormalForm::kNfd:
      return UTF8PROC_DECOMPOSE;
    case NormalForm::kNfkc:
      return static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
    case NormalForm::kNfkd:
      return static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  }
  throw LogicError("[text.normal_form] unknown form {}", static_cast<int>(form));
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char byte) { return static_cast<signed char>(byte) >= 0; });
}

/// utf8proc composes this pair since Unicode 13, `tokenizers` does not.
void take_apart(std::string& text) {
  constexpr std::string_view kWhole = "\xf0\x91\xa4\xb8", kPair = "\xf0\x91\xa4\xb5\xf0\x91\xa4\xb0";
  for (size_t at = text.find(kWhole); at != std::string::npos; at = text.find(kWhole, at + kPair.size())) {
    text.replace(at, kWhole.size(), kPair);
  }
}

void append_normalized(std::string& result, std::string_view text, NormalForm form) {
  if (is_ascii(text)) {
    result += text;
    return;
  }
  utf8proc_uint8_t* mapped = nullptr;
  const auto options = static_cast<utf8proc_option_t>(options_of(form) | UTF8PROC_STABLE);
  const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                             static_cast<utf8proc_ssize_t>(text.size()), &mapped, options);
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(mapped, &std::free);
  if (size < 0) {
    throw DataError("[text.normal_form] a text of {} bytes cannot be normalised: {}; shorten the document",
                    text.size(), utf8proc_errmsg(size));
  }
  std::string normalized(reinterpret_cast<const char*>(mapped), static_cast<size_t>(size));
  take_apart(normalized);
  result += normalized;
}

}  // namespace

void require_normal_forms() {}

std::string normalize(std::string_view text, NormalForm form) {
  if (is_ascii(text)) return std::string(text);
  std::string result;
  result.reserve(text.size());
  // A character that is left alone is a starter that composes with nothing, so the parts around it stand
  // alone.
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (point.value >= 0x80 && contains(kLeftAlone, point.value)) {
      append_normalized(result, text.substr(begin, i - begin), form);
      result.append(text, i, point.length);
      begin = i + point.length;
    }
    i += point.length;
  }
  append_normalized(result, text.substr(begin), form);
  return result;
}

size_t grapheme_length(std::string_view text) {
  utf8proc_int32_t state = 0;
  CodePoint last = code_point_at(text, 0);
  size_t length = last.length;
  while (length < text.size()) {
    const CodePoint next = code_point_at(text, length);
    if (utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(last.value),
                                         static_cast<utf8proc_int32_t>(next.value), &state)) {
      break;
    }
    length += next.length;
    last = next;
  }
  return length;
}

}  // namespace trireme::text
