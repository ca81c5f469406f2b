#pragma once
#include <variant>

#include "trireme/text/bpe.h"
#include "trireme/text/json_view.h"
#include "trireme/text/unigram.h"
#include "trireme/text/word_piece.h"

namespace trireme::text {

/// From the words of a text to tokens: each has vocabulary(), unknown_token() and encode(word, ids).
using Model = std::variant<Bpe, Unigram, WordPiece, WordLevel>;

/// A "model" in tokenizer.json. Throws ConfigError naming a type that there is not, and DataError for what is
/// damaged.
Model model_from(const JsonView& json);

inline const Vocabulary& vocabulary_of(const Model& model) {
  return std::visit([](const auto& kind) -> const Vocabulary& { return kind.vocabulary(); }, model);
}

}  // namespace trireme::text
