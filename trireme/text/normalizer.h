#pragma once
// Normalizers change a text before it is cut into words: a list of steps, each from text to text.
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "trireme/text/charsmap.h"
#include "trireme/text/json_view.h"
#include "trireme/text/normal_form.h"
#include "trireme/text/sentencepiece_normalizer.h"
#include "trireme/text/split.h"

namespace trireme::text {

// The steps, named as in `tokenizers`.
struct Lowercase {};
struct StripAccents {};  ///< drops all marks
struct Strip {           ///< white space at the ends
  bool left, right;
};
struct Replace {
  Pattern pattern;
  std::string content;
};
struct Prepend {  ///< before a text that is not empty
  std::string content;
};
struct BertCleaning {
  bool clean_text, handle_chinese_chars, strip_accents, lowercase;
};
struct NmtCleaning {};  ///< control characters away, unusual spaces to a space
struct SpellBytes {};   ///< GPT-2's alphabet for bytes, see byte_level.h
using NormalizerStep = std::variant<NormalForm, Lowercase, StripAccents, Strip, Replace, Prepend,
                                    BertCleaning, NmtCleaning, SpellBytes, Charsmap, SentencePieceNormalizer>;

using Normalizer = std::vector<NormalizerStep>;

/// `text` after each of the steps.
std::string normalize(const Normalizer& normalizer, std::string_view text);

/// The steps of a "normalizer" in tokenizer.json; Sequence is flattened. Throws ConfigError naming a
/// component that there is not, and DataError for fields of wrong types.
Normalizer normalizer_from(const JsonView& json);

/// A "pattern" of tokenizer.json: {"String": text} or {"Regex": expression}.
Pattern pattern_from(const JsonView& json);

}  // namespace trireme::text
