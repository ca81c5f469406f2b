#pragma once
// Byte-pair encoding (Sennrich et al. 2016) as `tokenizers` and tiktoken have it.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/text/added_tokens.h"
#include "trireme/text/merge_table.h"
#include "trireme/text/vocabulary.h"

namespace trireme::text {

struct BpeOptions {
  std::string unknown = {};                    ///< the token for characters that are none; empty: drop them
  std::string continuing_subword_prefix = {};  ///< before each character but the first of a word
  std::string end_of_word_suffix = {};         ///< after the last one
  bool fuse_unknown = false;                   ///< one token for neighbouring unknown characters
  bool byte_fallback = false;                  ///< characters that are no tokens are spelled as <0x0A>
  bool ignore_merges = false;                  ///< a word that is a token is that token
};

class Bpe {
 public:
  using Pairs = std::vector<std::pair<std::string, std::string>>;

  /// `merges` in the order in which they were learned. Throws DataError naming `where` for a merge whose
  /// parts or result are no tokens, and for an unknown token that is none.
  Bpe(Vocabulary vocabulary, const Pairs& merges, BpeOptions options, const std::string& where);

  /// tiktoken's: tokens are bytes, and two neighbours merge when their bytes are a token, whose id is the
  /// rank.
  static Bpe of_bytes(Vocabulary vocabulary, const std::string& where);

  /// SentencePiece's: two neighbours merge when they spell a token, the one of the highest score first.
  /// `scores` by id; tokens that no text spells have none.
  static Bpe of_scores(Vocabulary vocabulary, const std::vector<std::optional<float>>& scores,
                       BpeOptions options, const std::string& where);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  std::optional<int32_t> unknown_token() const { return unknown_; }

  /// Whether take_bytes() changes nothing but the form of the words.
  bool can_take_bytes() const;
  /// From here on words are bytes instead of what spell_bytes() makes of them.
  void take_bytes();

  /// Tokens that are taken wherever a text spells them, the longest first, and that merge with nothing.
  void keep_whole(const std::vector<int32_t>& ids);

  /// Appends the tokens of `word`, which is well-formed UTF-8 unless words are bytes.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  Bpe(Vocabulary vocabulary, BpeOptions options)
      : vocabulary_(std::move(vocabulary)), options_(std::move(options)) {}
  void add_merges(const Pairs& pairs, const std::string& where);
  void encode_part(std::string_view part, std::vector<int32_t>& ids) const;
  std::optional<int32_t> whole_word(std::string_view word) const;
  void add_characters(std::string_view word, std::vector<int32_t>& ids) const;
  void add_bytes(std::string_view word, std::vector<int32_t>& ids) const;

  Vocabulary vocabulary_;
  BpeOptions options_;
  MergeTable merges_;
  TokenFinder whole_;
  std::optional<int32_t> unknown_;
  bool words_are_bytes_ = false;
  std::array<int32_t, 256> byte_tokens_{};  ///< where words are bytes; -1: none
  Vocabulary byte_words_;                   ///< where words are bytes and merges are ignored: tokens as bytes
};

}  // namespace trireme::text
