#pragma once
// The normaliser of SentencePiece: replacements of characters, and what becomes of spaces.
#include <string>
#include <string_view>

#include "trireme/text/charsmap.h"
#include "trireme/text/trie.h"

namespace trireme::text {

struct SentencePieceNormalizer {
  Charsmap charsmap;
  Trie kept;  ///< texts that are not replaced: user-defined pieces
  bool add_dummy_prefix, remove_extra_whitespaces;

  /// `text` with U+2581 for each space that is left.
  std::string apply(std::string_view text) const;

 private:
  Charsmap::Entry first(std::string_view text) const;
  std::string_view without_spaces_at_begin(std::string_view text) const;
};

}  // namespace trireme::text
