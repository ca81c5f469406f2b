#include "trireme/text/word_piece.h"

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

int32_t unknown_id(const Vocabulary& vocabulary, std::string_view unknown, const std::string& where) {
  if (const auto id = vocabulary.find(unknown)) return *id;
  throw DataError(
      "[text.word_piece] {}: the unknown token '{}' is not in the vocabulary of {} tokens; get the file "
      "again",
      where, printable_line(unknown), vocabulary.size());
}

/// The end of `text` without its last character.
size_t before_last_character(std::string_view text, size_t end) {
  return character_begin(text, end - 1);
}

}  // namespace

WordPiece::WordPiece(Vocabulary vocabulary, Options options, const std::string& where)
    : vocabulary_(std::move(vocabulary)),
      options_(std::move(options)),
      unknown_(unknown_id(vocabulary_, options_.unknown, where)) {}

std::pair<int32_t, size_t> WordPiece::longest_at(std::string_view word, size_t begin) const {
  std::string candidate = begin == 0 ? std::string() : options_.prefix;
  const size_t prefix = candidate.size();
  candidate += word.substr(begin);
  for (size_t end = word.size(); end > begin; end = before_last_character(word, end)) {
    candidate.resize(prefix + end - begin);
    if (const auto id = vocabulary_.find(candidate)) return {*id, end};
  }
  return {unknown_, begin};
}

void WordPiece::encode(std::string_view word, std::vector<int32_t>& ids) const {
  const size_t first = ids.size();
  const bool is_long = static_cast<int64_t>(count_characters(word)) > options_.longest_word;
  for (size_t begin = 0; begin < word.size() && !is_long;) {
    const auto [id, end] = longest_at(word, begin);
    if (end == begin) {
      ids.resize(first);
      break;
    }
    ids.push_back(id);
    begin = end;
  }
  if (ids.size() == first) ids.push_back(unknown_);
}

WordLevel::WordLevel(Vocabulary vocabulary, std::string_view unknown, const std::string& where)
    : vocabulary_(std::move(vocabulary)), unknown_(unknown_id(vocabulary_, unknown, where)) {}

void WordLevel::encode(std::string_view word, std::vector<int32_t>& ids) const {
  ids.push_back(vocabulary_.find(word).value_or(unknown_));
}

}  // namespace trireme::text
