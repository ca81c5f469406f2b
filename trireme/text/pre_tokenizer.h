#pragma once
// How a normalised text is cut into words, which the model encodes one by one: a list of steps.
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "trireme/text/json_view.h"
#include "trireme/text/span.h"
#include "trireme/text/split.h"

namespace trireme::text {

/// A text and the words in it, in order; what is in no word is dropped.
struct Pieces {
  std::string text;
  std::vector<Span> words;
  bool starts_input = true;  ///< the text begins where the whole input does
};

// The steps, named as in `tokenizers`.
struct Split {  ///< also Digits, Punctuation, WhitespaceSplit, CharDelimiterSplit, BertPreTokenizer
  Pattern pattern;
  SplitBehavior behavior;
  bool invert = false;
};
struct Whitespace {};  ///< runs of word characters, and runs of what is neither such nor white space
struct ByteLevel {
  bool add_prefix_space;
  bool use_regex;            ///< GPT-2's expression
  bool spells_bytes = true;  ///< in GPT-2's alphabet; a model of bytes takes words as they are
};
enum class PrependScheme { kAlways, kFirst, kNever };
struct Metaspace {
  std::string replacement;  ///< for a space; one character
  PrependScheme prepend_scheme;
  bool split;
};
using PreTokenizerStep = std::variant<Split, Whitespace, ByteLevel, Metaspace>;

using PreTokenizer = std::vector<PreTokenizerStep>;

/// GPT-2's expression (Radford et al. 2019, encoder.py).
extern const char* const kGpt2Pattern;

/// Takes the steps, one after the other, on the words that there are.
void pre_tokenize(const PreTokenizer& pre_tokenizer, Pieces& pieces);

/// The steps of a "pre_tokenizer" in tokenizer.json; Sequence is flattened. Throws ConfigError naming a
/// component that there is not, and DataError for fields of wrong types.
PreTokenizer pre_tokenizer_from(const JsonView& json);

/// "prepend_scheme" of Metaspace, or the older "add_prefix_space".
PrependScheme prepend_scheme_from(const JsonView& json);

}  // namespace trireme::text
