#include "trireme/text/normalizer.h"

#include "trireme/text/byte_level.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

std::string strip_spaces(std::string_view text, Strip sides) {
  size_t begin = 0, end = 0;  // end: after the last character that is no space
  bool seen = false;
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (!is_space(point.value)) {
      if (!seen) begin = i;
      seen = true;
      end = i + point.length;
    }
    i += point.length;
  }
  if (!seen && (sides.left || sides.right)) return {};
  if (!sides.left) begin = 0;
  if (!sides.right) end = text.size();
  return std::string(text.substr(begin, end - begin));
}

/// Without control characters, and with a plain space for each kind of space.
std::string clean_for_bert(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    // Some control characters are white space, too; they go.
    if (!contains(kControls, point.value)) {
      is_space(point.value) ? clean += ' ' : clean.append(text, i, point.length);
    }
    i += point.length;
  }
  return clean;
}

std::string space_ideographs(std::string_view text) {
  std::string spaced;
  spaced.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    const bool is_ideograph = contains(kIdeographs, point.value);
    if (is_ideograph) spaced += ' ';
    spaced.append(text, i, point.length);
    if (is_ideograph) spaced += ' ';
    i += point.length;
  }
  return spaced;
}

bool is_dropped_by_nmt(uint32_t code) {
  return (code >= 1 && code <= 8) || code == 0xb || (code >= 0xe && code <= 0x1f) || code == 0x7f ||
         code == 0x8f || code == 0x9f;
}

bool is_space_to_nmt(uint32_t code) {
  return code == 0x9 || code == 0xa || code == 0xc || code == 0xd || code == 0x1680 ||
         (code >= 0x200b && code <= 0x200f) || code == 0x2028 || code == 0x2029 || code == 0x2581 ||
         code == 0xfeff || code == 0xfffd;
}

std::string clean_for_nmt(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (is_space_to_nmt(point.value)) {
      clean += ' ';
    } else if (!is_dropped_by_nmt(point.value)) {
      clean.append(text, i, point.length);
    }
    i += point.length;
  }
  return clean;
}

struct ApplyStep {
  std::string_view text;

  std::string operator()(NormalForm form) const { return normalize(text, form); }
  std::string operator()(const Lowercase&) const { return to_lower(text); }
  std::string operator()(const StripAccents&) const {
    return without(text, [](uint32_t code) { return contains(kMarks, code); });
  }
  std::string operator()(const Strip& sides) const { return strip_spaces(text, sides); }
  std::string operator()(const Replace& step) const { return replace_all(text, step.pattern, step.content); }
  std::string operator()(const Prepend& step) const {
    return text.empty() ? std::string() : step.content + std::string(text);
  }
  std::string operator()(const BertCleaning& step) const {
    std::string result(text);
    if (step.clean_text) result = clean_for_bert(result);
    if (step.handle_chinese_chars) result = space_ideographs(result);
    if (step.strip_accents) {
      result = without(normalize(result, NormalForm::kNfd),
                       [](uint32_t code) { return contains(kNonspacingMarks, code); });
    }
    return step.lowercase ? to_lower(result) : result;
  }
  std::string operator()(const NmtCleaning&) const { return clean_for_nmt(text); }
  std::string operator()(const SpellBytes&) const { return spell_bytes(text); }
  std::string operator()(const Charsmap& charsmap) const { return charsmap.apply(text); }
  std::string operator()(const SentencePieceNormalizer& step) const { return step.apply(text); }
};

}  // namespace

std::string normalize(const Normalizer& normalizer, std::string_view text) {
  std::string result(text);
  for (const NormalizerStep& step : normalizer) result = std::visit(ApplyStep{result}, step);
  return result;
}

}  // namespace trireme::text
