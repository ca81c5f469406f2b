#include "trireme/text/unigram.h"

#include <algorithm>
#include <limits>

#include "trireme/base/error.h"
#include "trireme/text/span.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr double kUnknownPenalty = 10.0;  // below the least probable token, as in SentencePiece
constexpr size_t kNowhere = SIZE_MAX;

}  // namespace

struct Unigram::Node {
  int32_t id = 0;
  double score = 0.0;
  size_t begin = kNowhere;  ///< of the last token of the way
};

Unigram::Unigram(const Pieces& pieces, const Options& options, const std::string& where)
    : byte_fallback_(options.byte_fallback),
      single_precision_(options.single_precision),
      preferred_(options.preferred) {
  double least = std::numeric_limits<double>::infinity();
  const auto is_in_text = [&](size_t id) { return options.not_in_text.empty() || !options.not_in_text[id]; };
  for (const auto& [token, score] : pieces) {
    vocabulary_.add(token, static_cast<int64_t>(scores_.size()), where);
    if (is_in_text(scores_.size()) && !is_preferred(scores_.size())) least = std::min(least, score);
    scores_.push_back(score);
  }
  // The last one of equal tokens counts, and a trie keeps the first that it is given.
  for (size_t id = pieces.size(); id-- > 0;) {
    if (is_in_text(id)) trie_.insert(pieces[id].first, static_cast<int32_t>(id));
  }
  unknown_score_ = rounded(least - kUnknownPenalty);
  if (!options.unknown) return;
  if (*options.unknown < 0 || *options.unknown >= static_cast<int64_t>(pieces.size())) {
    throw DataError(
        "[text.unigram] {}: the unknown token has the id {}, outside the vocabulary of {}; get the file "
        "again",
        where, *options.unknown, pieces.size());
  }
  unknown_ = static_cast<int32_t>(*options.unknown);
}

bool Unigram::is_preferred(size_t id) const {
  return !preferred_.empty() && preferred_[id];
}

/// Of a token of `length` bytes. Logarithms of probabilities are negative, so that one that is not is chosen;
/// of two that overlap the longer one is, as in SentencePiece.
double Unigram::score_of(int32_t id, size_t length) const {
  const auto place = static_cast<size_t>(id);
  return is_preferred(place) ? rounded(0.1 * static_cast<double>(length - 1)) : scores_[place];
}

double Unigram::rounded(double score) const {
  return single_precision_ ? static_cast<double>(static_cast<float>(score)) : score;
}

int32_t Unigram::unknown() const {
  if (unknown_) return *unknown_;
  throw DataError(
      "[text.unigram] the text has a character that is no token, and the model has no unknown token; "
      "give it one ('unk_id')");
}

std::vector<Unigram::Node> Unigram::best_ways(std::string_view word) const {
  std::vector<Node> ways(word.size() + 1);
  const auto offer = [&](size_t begin, size_t end, int32_t id, double score) {
    Node& node = ways[end];
    const double sum = rounded(score);
    if (node.begin == kNowhere || sum > node.score) node = {id, sum, begin};
  };
  for (size_t begin = 0; begin < word.size();) {
    const size_t character = character_length(word[begin]);
    const double score = ways[begin].score;
    bool has_character = false;
    trie_.prefixes(word.substr(begin), [&](size_t length, int32_t id) {
      offer(begin, begin + length, id, score_of(id, length) + score);
      has_character |= length == character;
    });
    if (!has_character) offer(begin, begin + character, unknown(), unknown_score_ + score);
    begin += character;
  }
  return ways;
}

void Unigram::encode(std::string_view word, std::vector<int32_t>& ids) const {
  const std::vector<Node> ways = best_ways(word);
  std::vector<Span> tokens;  // from the last to the first
  bool was_unknown = false;
  for (size_t end = word.size(); end > 0; end = ways[end].begin) {
    const Node& node = ways[end];
    const bool is_unknown = unknown_ && node.id == *unknown_;
    if (is_unknown && was_unknown) {
      tokens.back().begin = node.begin;
    } else {
      tokens.push_back({node.begin, end});
    }
    was_unknown = is_unknown;
  }
  std::for_each(tokens.rbegin(), tokens.rend(), [&](const Span& token) { add_token(token.of(word), ids); });
}

void Unigram::add_token(std::string_view token, std::vector<int32_t>& ids) const {
  std::optional<int32_t> whole;
  trie_.prefixes(token, [&](size_t length, int32_t id) {
    if (length == token.size()) whole = id;
  });
  if (whole) {
    ids.push_back(*whole);
  } else if (const auto bytes = byte_fallback_ ? byte_ids(vocabulary_, token) : std::nullopt) {
    ids.insert(ids.end(), bytes->begin(), bytes->end());
  } else {
    ids.push_back(unknown());
  }
}

}  // namespace trireme::text
