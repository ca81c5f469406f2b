#pragma once
// How the texts of tokens become a text again: a list of steps, each from texts to texts, which are joined at
// the end.
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "trireme/text/json_view.h"
#include "trireme/text/split.h"

namespace trireme::text {

// The steps, named as in `tokenizers`.
struct DecodeByteLevel {};  ///< GPT-2's alphabet to bytes, and those to one text
struct JoinBytes {};        ///< bytes as they are (tiktoken) to one text
struct DecodeByteFallback {};
struct Fuse {};
struct StripTokens {  ///< up to so many characters at the ends of each text
  uint32_t content;
  int64_t start, stop;
};
struct ReplaceInTokens {
  Pattern pattern;
  std::string content;
};
struct DecodeMetaspace {
  std::string replacement;
  bool drops_first;  ///< in the first text the replacement is nothing instead of a space
};
struct DecodeWordPiece {
  std::string prefix;
  bool cleanup;  ///< no space before English punctuation
};
struct DecodeSentencePiece {
  std::string unknown;          ///< the unknown token
  std::string unknown_surface;  ///< what stands for it
  bool drops_first;             ///< the space that the text begins with
  bool drops_all;               ///< all of them
};
struct DecodeBpe {
  std::string suffix;
};
using DecoderStep =
    std::variant<DecodeByteLevel, JoinBytes, DecodeByteFallback, Fuse, StripTokens, ReplaceInTokens,
                 DecodeMetaspace, DecodeWordPiece, DecodeSentencePiece, DecodeBpe>;

struct Decoder {
  std::vector<DecoderStep> steps;
  std::string separator;  ///< between the texts at the end
};

/// Bytes that are not UTF-8 become U+FFFD as Rust's from_utf8_lossy makes it.
std::string decode(const Decoder& decoder, std::vector<std::string> tokens);

/// The steps of a "decoder" in tokenizer.json; Sequence is flattened. Throws ConfigError naming a component
/// that there is not, and DataError for fields of wrong types.
Decoder decoder_from(const JsonView& json);

}  // namespace trireme::text
