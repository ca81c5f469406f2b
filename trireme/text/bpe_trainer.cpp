#include "trireme/text/bpe_trainer.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/text/byte_level.h"
#include "trireme/text/vocabulary.h"

namespace trireme::text {
namespace {

constexpr int64_t kByteTokens = 256;
constexpr int64_t kMergesPerReport = 64;

/// Two ids; as a number it is ordered as they are.
using Pair = uint64_t;

Pair pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
int32_t left_of(Pair pair) {
  return static_cast<int32_t>(pair >> 32);
}
int32_t right_of(Pair pair) {
  return static_cast<int32_t>(pair & UINT32_MAX);
}

struct PairHash {
  size_t operator()(Pair pair) const { return mix64(pair, 0); }
};

/// A pair that may be merged next, with the words that had it when it came up.
struct PairInWords {
  int64_t count;
  Pair pair;
  std::vector<int32_t> words;
  /// The most frequent is on top of a heap, of those the one with the smallest ids.
  bool operator<(const PairInWords& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

class Heap {
 public:
  bool empty() const { return heap_.empty(); }
  void push(PairInWords candidate) {
    heap_.push_back(std::move(candidate));
    std::push_heap(heap_.begin(), heap_.end());
  }
  PairInWords pop() {
    std::pop_heap(heap_.begin(), heap_.end());
    PairInWords top = std::move(heap_.back());
    heap_.pop_back();
    return top;
  }

 private:
  std::vector<PairInWords> heap_;
};

/// TokenIds and their ids.
class TokenIds {
 public:
  /// The id of `token`, which it gets where it has none.
  int32_t add(std::string token) {
    const auto [place, is_new] = ids_.emplace(std::move(token), static_cast<int32_t>(texts_.size()));
    if (is_new) texts_.push_back(place->first);
    return place->second;
  }
  int32_t join(Pair pair) { return add(text(left_of(pair)) + text(right_of(pair))); }
  const std::string& text(int32_t id) const { return texts_[static_cast<size_t>(id)]; }
  int64_t size() const { return static_cast<int64_t>(texts_.size()); }
  std::vector<std::string> take() { return std::move(texts_); }

 private:
  std::unordered_map<std::string, int32_t, StringHash> ids_;
  std::vector<std::string> texts_;
};

/// The ids of the bytes, which are given in the order of their characters in GPT-2's alphabet.
std::array<int32_t, kByteTokens> add_bytes(TokenIds& tokens) {
  std::vector<std::pair<std::string, size_t>> characters;
  for (size_t byte = 0; byte < kByteTokens; ++byte)
    characters.emplace_back(spell_bytes(std::string(1, static_cast<char>(byte))), byte);
  std::ranges::sort(characters);  // UTF-8 is ordered as code points are
  std::array<int32_t, kByteTokens> ids{};
  for (const auto& [character, byte] : characters) ids[byte] = tokens.add(character);
  return ids;
}

/// The words as ids, one behind the other; merging makes them shorter in their places.
class Words {
 public:
  Words(std::span<const WordCount> counted, const std::array<int32_t, kByteTokens>& byte_ids) {
    for (const auto& [word, count] : counted) {
      words_.push_back({.begin = ids_.size(), .size = word.size(), .count = count});
      for (const char byte : word) ids_.push_back(byte_ids[static_cast<unsigned char>(byte)]);
    }
  }

  size_t size() const { return words_.size(); }
  /// How many tokens all words have, each as often as it was counted.
  int64_t tokens() const {
    int64_t sum = 0;
    for (const Word& word : words_) sum += word.count * static_cast<int64_t>(word.size);
    return sum;
  }
  int64_t count(size_t word) const { return words_[word].count; }
  std::span<const int32_t> ids(size_t word) const {
    return std::span(ids_).subspan(words_[word].begin, words_[word].size);
  }

  /// Merges `pair` in `word` from left to right. Calls change(pair, difference) for each pair beside a merge
  /// that goes (-1) or comes (1).
  template <typename Change>
  void merge(size_t word, Pair pair, int32_t merged, Change change) {
    int32_t* const ids = ids_.data() + words_[word].begin;
    const size_t size = words_[word].size;
    size_t kept = 0;
    for (size_t i = 0; i < size; ++kept) {
      if (i + 1 == size || pair_of(ids[i], ids[i + 1]) != pair) {
        ids[kept] = ids[i++];
        continue;
      }
      if (kept > 0) {
        change(pair_of(ids[kept - 1], ids[i]), -1);
        change(pair_of(ids[kept - 1], merged), 1);
      }
      if (i + 2 < size) {
        change(pair_of(ids[i + 1], ids[i + 2]), -1);
        change(pair_of(merged, ids[i + 2]), 1);
      }
      ids[kept] = merged;
      i += 2;
    }
    words_[word].size = kept;
  }

 private:
  struct Word {
    size_t begin, size;
    int64_t count;
  };
  std::vector<int32_t> ids_;
  std::vector<Word> words_;
};

/// Counts of pairs, and those of them that came up since the last merge.
class Pairs {
 public:
  void add(Pair pair, int64_t count, size_t word) {
    counts_[pair] += count;
    std::vector<int32_t>& words = new_[pair];
    const auto index = static_cast<int32_t>(word);
    if (words.empty() || words.back() != index) words.push_back(index);
  }
  void remove(Pair pair, int64_t count) { counts_[pair] -= count; }
  int64_t count(Pair pair) const { return counts_.at(pair); }

  void queue(Heap& heap) {
    for (auto& [pair, words] : new_) {
      if (const int64_t count = counts_[pair]; count > 0) heap.push({count, pair, std::move(words)});
    }
    new_.clear();
  }

 private:
  std::unordered_map<Pair, int64_t, PairHash> counts_;
  std::unordered_map<Pair, std::vector<int32_t>, PairHash> new_;
};

Pairs pairs_of(const Words& words) {
  Pairs pairs;
  for (size_t word = 0; word < words.size(); ++word) {
    const std::span<const int32_t> ids = words.ids(word);
    for (size_t i = 1; i < ids.size(); ++i) pairs.add(pair_of(ids[i - 1], ids[i]), words.count(word), word);
  }
  return pairs;
}

/// The merges in order. What `tokenizers` does where two merges make the same token is done likewise: the
/// pairs with that token come up twice, each time for some of the words.
std::vector<Pair> learn(Words& words, TokenIds& tokens, const BpeTraining& training) {
  Pairs pairs = pairs_of(words);
  Heap heap;
  pairs.queue(heap);
  std::vector<Pair> merges;
  while (tokens.size() < training.vocab_size && !heap.empty()) {
    PairInWords top = heap.pop();
    if (const int64_t count = pairs.count(top.pair); count != top.count) {
      top.count = count;  // it has lost neighbourhoods to other merges
      heap.push(std::move(top));
      continue;
    }
    if (top.count < 1) break;
    const int32_t merged = tokens.join(top.pair);
    merges.push_back(top.pair);
    for (const int32_t index : top.words) {
      const auto word = static_cast<size_t>(index);
      const int64_t count = words.count(word);
      words.merge(word, top.pair, merged, [&](Pair pair, int difference) {
        difference > 0 ? pairs.add(pair, count, word) : pairs.remove(pair, count);
      });
    }
    pairs.queue(heap);
    if (training.on_progress && tokens.size() % kMergesPerReport == 0) training.on_progress(tokens.size());
  }
  return merges;
}

/// Without the earlier ones of equal pairs, as a table of merges that is filled in order keeps them.
std::vector<std::pair<int32_t, int32_t>> last_of_each(const std::vector<Pair>& merges) {
  std::unordered_map<Pair, size_t, PairHash> last;
  for (size_t i = 0; i < merges.size(); ++i) last[merges[i]] = i;
  std::vector<std::pair<int32_t, int32_t>> kept;
  for (size_t i = 0; i < merges.size(); ++i) {
    if (last[merges[i]] == i) kept.emplace_back(left_of(merges[i]), right_of(merges[i]));
  }
  return kept;
}

void check_training(const BpeTraining& training) {
  for (const std::string& token : training.special) {
    if (!token.empty() && is_utf8(token)) continue;
    throw ConfigError("[text.bpe_trainer] the special token '{}' is empty or no UTF-8; give it a text",
                      printable_line(token));
  }
  if (training.vocab_size > kMostTokens) {
    throw ConfigError("[text.bpe_trainer] a vocabulary of {} is larger than {}; choose a smaller one",
                      with_commas(training.vocab_size), with_commas(kMostTokens));
  }
}

void check_room(const TokenIds& tokens, const BpeTraining& training) {
  if (tokens.size() <= training.vocab_size) return;
  throw ConfigError(
      "[text.bpe_trainer] a vocabulary of {} has no room for 256 bytes and {} special token{}; choose {} or "
      "more",
      training.vocab_size, tokens.size() - kByteTokens, tokens.size() == kByteTokens + 1 ? "" : "s",
      tokens.size());
}

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump();
}

}  // namespace

TrainedBpe train_bpe(std::span<const WordCount> counted, const BpeTraining& training) {
  check_training(training);
  TokenIds tokens;
  TrainedBpe trained;
  for (const std::string& token : training.special) {
    if (tokens.add(token) == static_cast<int32_t>(trained.special.size())) trained.special.push_back(token);
  }
  const std::array<int32_t, kByteTokens> byte_ids = add_bytes(tokens);
  check_room(tokens, training);
  Words words(counted, byte_ids);
  trained.merges = last_of_each(learn(words, tokens, training));
  trained.text_tokens = words.tokens();
  trained.tokens = tokens.take();
  return trained;
}

std::string tokenizer_json(const TrainedBpe& trained) {
  std::vector<std::string> added, vocabulary, merges;
  for (size_t id = 0; id < trained.special.size(); ++id) {
    added.push_back(fmt::format(
        R"({{"id":{},"content":{},"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}})",
        id, quoted(trained.special[id])));
  }
  for (size_t id = 0; id < trained.tokens.size(); ++id)
    vocabulary.push_back(fmt::format("{}:{}", quoted(trained.tokens[id]), id));
  const auto text = [&](int32_t id) { return quoted(trained.tokens[static_cast<size_t>(id)]); };
  for (const auto& [left, right] : trained.merges)
    merges.push_back(fmt::format("[{},{}]", text(left), text(right)));
  return fmt::format(
      R"({{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{}],"normalizer":null,)"
      R"("pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}},)"
      R"("post_processor":null,)"
      R"("decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},)"
      R"("model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,)"
      R"("end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,)"
      "\"vocab\":{{{}}},\n\"merges\":[{}]}}}}\n",
      join(added, ","), join(vocabulary, ","), join(merges, ","));
}

}  // namespace trireme::text
