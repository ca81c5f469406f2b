#pragma once
// The unigram language model (Kudo 2018): of all ways to spell a word by tokens the one with the greatest sum
// of log probabilities, found by Viterbi's algorithm.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/text/trie.h"
#include "trireme/text/vocabulary.h"

namespace trireme::text {

class Unigram {
 public:
  using Pieces = std::vector<std::pair<std::string, double>>;
  struct Options {
    std::optional<int64_t> unknown = {};  ///< id of the token for characters that are in none
    bool byte_fallback = false;           ///< unknown characters are spelled as <0x0A>
    bool single_precision = false;        ///< of sums, as in SentencePiece
    std::vector<bool> not_in_text = {};   ///< by id, tokens that no text spells; empty: there are none
    /// By id, tokens that are chosen wherever they are spelled, whatever their score; empty: there are none.
    std::vector<bool> preferred = {};
  };

  /// Tokens with their log probabilities; an id is a place in `pieces`. Throws DataError naming `where` for
  /// an unknown token outside of it.
  Unigram(const Pieces& pieces, const Options& options, const std::string& where);

  const Vocabulary& vocabulary() const { return vocabulary_; }
  std::optional<int32_t> unknown_token() const { return unknown_; }

  /// Appends the tokens of `word`, which is well-formed UTF-8. Neighbouring unknown characters are one token.
  /// Throws DataError for an unknown character where there is no unknown token.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  struct Node;  ///< the best way to a place in a word
  std::vector<Node> best_ways(std::string_view word) const;
  void add_token(std::string_view token, std::vector<int32_t>& ids) const;
  int32_t unknown() const;
  double rounded(double score) const;
  bool is_preferred(size_t id) const;
  double score_of(int32_t id, size_t length) const;

  Vocabulary vocabulary_;
  std::vector<double> scores_;  ///< by id
  Trie trie_;
  std::optional<int32_t> unknown_;
  bool byte_fallback_, single_precision_;
  std::vector<bool> preferred_;  ///< by id, or empty
  double unknown_score_;
};

}  // namespace trireme::text
