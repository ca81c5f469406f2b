#pragma once
// WordPiece (Schuster and Nakajima 2012): the longest token that a word begins with, then of the rest the
// longest that continues a word; and WordLevel, where only whole words are tokens.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/vocabulary.h"

namespace trireme::text {

class WordPiece {
 public:
  struct Options {
    std::string unknown = "[UNK]";  ///< for a word that cannot be spelled
    std::string prefix = "##";      ///< of tokens that continue a word
    int64_t longest_word = 100;     ///< in characters; longer ones are unknown
  };

  /// Throws DataError naming `where` for an unknown token that is not in the vocabulary.
  WordPiece(Vocabulary vocabulary, Options options, const std::string& where);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  std::optional<int32_t> unknown_token() const { return unknown_; }
  /// Appends the tokens of `word`, which is well-formed UTF-8.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  /// The longest token at `begin` of `word`, and where it ends; an end of `begin`: there is none.
  std::pair<int32_t, size_t> longest_at(std::string_view word, size_t begin) const;

  Vocabulary vocabulary_;
  Options options_;
  int32_t unknown_;
};

class WordLevel {
 public:
  /// Throws DataError naming `where` for an unknown token that is not in the vocabulary.
  WordLevel(Vocabulary vocabulary, std::string_view unknown, const std::string& where);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  std::optional<int32_t> unknown_token() const { return unknown_; }
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  Vocabulary vocabulary_;
  int32_t unknown_;
};

}  // namespace trireme::text
