#include "trireme/text/bpe.h"

#include <algorithm>
#include <functional>
#include <map>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/byte_level.h"
#include "trireme/text/merge_word.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr int32_t kNoToken = -1;

int32_t required(const Vocabulary& vocabulary, std::string_view token, std::string_view what,
                 const std::string& where) {
  const auto id = vocabulary.find(token);
  if (id) return *id;
  throw DataError("[text.bpe] {}: {} '{}' is not in the vocabulary of {} tokens; get the file again", where,
                  what, printable_line(token), vocabulary.size());
}

/// The place of each score among all, from the highest; equal ones share it.
std::map<float, int32_t, std::greater<>> ranks_of(const std::vector<std::optional<float>>& scores) {
  std::map<float, int32_t, std::greater<>> ranks;
  for (const auto& score : scores) {
    if (score) ranks.emplace(*score, 0);
  }
  int32_t next = 0;
  for (auto& [score, rank] : ranks) rank = next++;
  return ranks;
}

/// The unknown characters of a word, which become tokens when it is known whether the next is one of them.
class UnknownRun {
 public:
  UnknownRun(std::optional<int32_t> token, bool fuses, std::vector<int32_t>& ids)
      : token_(token), fuses_(fuses), ids_(ids) {}

  void add() {
    if (pending_ && !fuses_) flush();
    pending_ = token_.has_value();
  }
  void flush() {
    if (pending_) ids_.push_back(*token_);
    pending_ = false;
  }

 private:
  std::optional<int32_t> token_;
  bool fuses_;
  std::vector<int32_t>& ids_;
  bool pending_ = false;
};

}  // namespace

Bpe::Bpe(Vocabulary vocabulary, const Pairs& merges, BpeOptions options, const std::string& where)
    : Bpe(std::move(vocabulary), std::move(options)) {
  if (!options_.unknown.empty())
    unknown_ = required(vocabulary_, options_.unknown, "the unknown token", where);
  add_merges(merges, where);
}

void Bpe::add_merges(const Pairs& pairs, const std::string& where) {
  int32_t rank = 0;
  for (const auto& [left, right] : pairs) {
    const std::string place = fmt::format("{}: merge {}", where, rank);
    const std::string_view tail =
        std::string_view(right).substr(std::min(options_.continuing_subword_prefix.size(), right.size()));
    const int32_t left_id = required(vocabulary_, left, "the left part", place);
    const int32_t right_id = required(vocabulary_, right, "the right part", place);
    const int32_t id = required(vocabulary_, left + std::string(tail), "the result", place);
    merges_.insert(left_id, right_id, {rank++, id});
  }
}

Bpe Bpe::of_bytes(Vocabulary vocabulary, const std::string& where) {
  Bpe model(std::move(vocabulary), {.ignore_merges = true});
  model.words_are_bytes_ = true;
  for (int byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    model.byte_tokens_[static_cast<size_t>(byte)] =
        required(model.vocabulary_, {&text, 1}, "the byte", where);
  }
  for (int32_t id = 0; id < model.vocabulary_.size(); ++id) {
    const auto token = model.vocabulary_.token(id);
    for (size_t cut = 1; token && cut < token->size(); ++cut) {
      const auto left = model.vocabulary_.find(token->substr(0, cut));
      const auto right = model.vocabulary_.find(token->substr(cut));
      if (left && right) model.merges_.insert(*left, *right, {id, id});
    }
    if (token) model.byte_words_.add(*token, id, where);
  }
  return model;
}

Bpe Bpe::of_scores(Vocabulary vocabulary, const std::vector<std::optional<float>>& scores, BpeOptions options,
                   const std::string& where) {
  Bpe model(std::move(vocabulary), std::move(options));
  model.unknown_ = required(model.vocabulary_, model.options_.unknown, "the unknown token", where);
  const std::map<float, int32_t, std::greater<>> ranks = ranks_of(scores);
  for (int32_t id = 0; id < model.vocabulary_.size(); ++id) {
    const auto score = scores[static_cast<size_t>(id)];
    const auto token = model.vocabulary_.token(id);
    for (size_t cut = 1; score && token && cut < token->size(); ++cut) {
      const auto left = model.vocabulary_.find(token->substr(0, cut));
      const auto right = model.vocabulary_.find(token->substr(cut));
      if (left && right) model.merges_.insert(*left, *right, {ranks.at(*score), id});
    }
  }
  return model;
}

void Bpe::keep_whole(const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    const std::string content(vocabulary_.token(id).value_or(""));
    whole_.add({.content = content, .id = id}, content);
  }
}

bool Bpe::can_take_bytes() const {
  return !options_.byte_fallback && options_.continuing_subword_prefix.empty() &&
         options_.end_of_word_suffix.empty();
}

void Bpe::take_bytes() {
  words_are_bytes_ = true;
  for (size_t byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    byte_tokens_[byte] = vocabulary_.find(spell_bytes({&text, 1})).value_or(kNoToken);
  }
  if (!options_.ignore_merges) return;
  for (int32_t id = 0; id < vocabulary_.size(); ++id) {
    const auto token = vocabulary_.token(id);
    const auto bytes = token ? spelled_bytes(*token) : std::nullopt;
    if (bytes) byte_words_.add(*bytes, id, "the byte-level vocabulary");
  }
}

std::optional<int32_t> Bpe::whole_word(std::string_view word) const {
  if (!options_.ignore_merges) return std::nullopt;
  return (words_are_bytes_ ? byte_words_ : vocabulary_).find(word);
}

void Bpe::encode(std::string_view word, std::vector<int32_t>& ids) const {
  if (const auto id = whole_word(word)) {
    ids.push_back(*id);
    return;
  }
  if (whole_.empty()) {
    encode_part(word, ids);
    return;
  }
  for (const Part& part : whole_.split(word)) {
    part.token ? ids.push_back(*part.token) : encode_part(part.span.of(word), ids);
  }
}

void Bpe::encode_part(std::string_view part, std::vector<int32_t>& ids) const {
  const size_t begin = ids.size();
  if (words_are_bytes_) {
    add_bytes(part, ids);
  } else {
    add_characters(part, ids);
  }
  merge_word(merges_, ids, begin);
}

void Bpe::add_bytes(std::string_view word, std::vector<int32_t>& ids) const {
  UnknownRun unknown(unknown_, options_.fuse_unknown, ids);
  for (const char byte : word) {
    const int32_t id = byte_tokens_[static_cast<unsigned char>(byte)];
    if (id == kNoToken) {
      unknown.add();
      continue;
    }
    unknown.flush();
    ids.push_back(id);
  }
  unknown.flush();
}

void Bpe::add_characters(std::string_view word, std::vector<int32_t>& ids) const {
  UnknownRun unknown(unknown_, options_.fuse_unknown, ids);
  for (size_t i = 0; i < word.size();) {
    const size_t length = character_length(word[i]);
    std::string symbol(word.substr(i, length));
    if (i > 0) symbol.insert(0, options_.continuing_subword_prefix);
    i += length;
    if (i >= word.size()) symbol += options_.end_of_word_suffix;
    if (const auto id = vocabulary_.find(symbol)) {
      unknown.flush();
      ids.push_back(*id);
    } else if (const auto bytes = options_.byte_fallback ? byte_ids(vocabulary_, symbol) : std::nullopt) {
      ids.insert(ids.end(), bytes->begin(), bytes->end());
    } else {
      unknown.add();
    }
  }
  unknown.flush();
}

}  // namespace trireme::text
