#include "trireme/text/word_counts.h"

#include <algorithm>
#include <future>
#include <mutex>
#include <unordered_map>

#include "trireme/base/threads.h"
#include "trireme/base/utf8.h"
#include "trireme/text/pre_tokenizer.h"
#include "trireme/text/unicode.h"
#include "trireme/text/vocabulary.h"

namespace trireme::text {
namespace {

using WordMap = std::unordered_map<std::string, int64_t, StringHash, std::equal_to<>>;

void add_words(std::string text, WordMap& counts) {
  static const PreTokenizer gpt2 = {
      ByteLevel{.add_prefix_space = false, .use_regex = true, .spells_bytes = false}};
  Pieces pieces{.text = is_utf8(text) ? std::move(text) : replace_invalid(text), .words = {}};
  if (pieces.text.empty()) return;
  pieces.words = {{0, pieces.text.size()}};
  pre_tokenize(gpt2, pieces);
  for (const Span& span : pieces.words) {
    const std::string_view word = span.of(pieces.text);
    const auto found = counts.find(word);
    found == counts.end() ? void(counts.emplace(word, 1)) : void(++found->second);
  }
}

/// Hands texts to threads, until one of them has failed.
class Source {
 public:
  explicit Source(const NextText& next) : next_(next) {}

  WordMap count() {
    WordMap counts;
    try {
      while (auto text = take()) add_words(std::move(*text), counts);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      over_ = true;
      throw;
    }
    return counts;
  }

 private:
  std::optional<std::string> take() {
    const std::lock_guard lock(mutex_);
    if (over_) return std::nullopt;
    std::optional<std::string> text = next_();
    over_ = !text;
    return text;
  }

  const NextText& next_;
  std::mutex mutex_;
  bool over_ = false;
};

/// Sums do not depend on the order, so that any number of threads gives the same.
void add_counts(WordMap& all, WordMap part) {
  while (!part.empty()) {
    auto node = part.extract(part.begin());
    all[std::move(node.key())] += node.mapped();
  }
}

bool is_ascii_space(char byte) {
  return byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r';
}

/// No word goes on from a visible character to white space, nor looks beyond it. Only those of ASCII are
/// looked at: a byte alone does not tell whether another character is white space.
bool is_between_words(std::string_view text, size_t place) {
  return text[place - 1] > ' ' && text[place - 1] <= '~' && is_ascii_space(text[place]);
}

}  // namespace

std::vector<WordCount> count_words(const NextText& next, int64_t threads) {
  Source source(next);
  std::vector<std::future<WordMap>> helpers;
  start_threads(threads - 1, 0, [&] {
    helpers.push_back(std::async(std::launch::async, [&source] { return source.count(); }));
  });
  WordMap all = source.count();
  for (auto& helper : helpers) add_counts(all, helper.get());
  std::vector<WordCount> words;
  words.reserve(all.size());
  while (!all.empty()) {
    auto node = all.extract(all.begin());
    words.push_back({std::move(node.key()), node.mapped()});
  }
  std::ranges::sort(words, {}, &WordCount::word);
  return words;
}

size_t cut_between_words(std::string_view text, size_t limit) {
  for (size_t place = limit; place > 0; --place) {
    if (is_between_words(text, place)) return place;
  }
  const size_t begin = character_begin(text, limit);
  return begin == 0 ? limit : begin;
}

}  // namespace trireme::text
