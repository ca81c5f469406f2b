#pragma once
// Tokens that are found in a text before it is cut into words: special ones, such as the one that ends a
// document, and those that users added.
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "trireme/text/normalizer.h"
#include "trireme/text/span.h"
#include "trireme/text/trie.h"

namespace trireme::text {

struct AddedToken {
  std::string content;
  int32_t id;
  bool single_word = false;  ///< not inside a word
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space after it
  bool normalized = false;   ///< is looked for in the normalised text
  bool special = false;      ///< decode() can leave it out
  bool in_text = true;       ///< false: no text spells it, as control symbols of SentencePiece
};

/// A part of a text: an added token, or text between such.
struct Part {
  Span span;
  std::optional<int32_t> token;
};

/// Finds some added tokens: the leftmost first, of those at one place the longest.
class TokenFinder {
 public:
  /// `spelling`: how `token` looks in the texts.
  void add(const AddedToken& token, std::string_view spelling);
  bool empty() const { return tokens_.empty(); }
  /// The parts of `text`, none of them empty.
  std::vector<Part> split(std::string_view text) const;

 private:
  struct Found {
    Span span;
    const AddedToken* token;
  };
  std::optional<Found> next(std::string_view text, size_t begin) const;

  std::vector<AddedToken> tokens_;
  Trie trie_;                         // values: places in tokens_
  std::array<bool, 256> is_first_{};  // bytes that spellings begin with
};

class AddedTokens {
 public:
  AddedTokens() = default;
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer);

  const TokenFinder& in_raw_text() const { return raw_; }
  const TokenFinder& in_normalized_text() const { return normalized_; }
  std::optional<std::string_view> content(int32_t id) const;
  std::optional<int32_t> find(std::string_view content) const;
  bool is_special(std::string_view content) const { return special_.count(std::string(content)) != 0; }
  /// One more than the largest id; 0: there are none.
  int64_t id_end() const;

 private:
  TokenFinder raw_, normalized_;
  std::unordered_map<int32_t, std::string> contents_;
  std::unordered_set<std::string> special_;
};

}  // namespace trireme::text
