#pragma once
// How often each word occurs in texts, as GPT-2 cuts them: what byte-pair encoding is learned from.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::text {

struct WordCount {
  std::string word;  ///< bytes
  int64_t count;
  bool operator==(const WordCount&) const = default;
};

/// The next text of many, from one thread at a time; nothing after the last.
using NextText = std::function<std::optional<std::string>()>;

/// The words of all texts, ordered bytewise, on `threads` threads. Bytes that are no UTF-8 count as U+FFFD,
/// as Tokenizer::encode() reads them. Memory holds the distinct words, once a thread at most, and a text a
/// thread. What `next` throws ends the count.
std::vector<WordCount> count_words(const NextText& next, int64_t threads);

/// Where `text` can be cut without a change of its words: the last such place up to `limit`, or, where there
/// is none, the last one between two characters. `text` is longer than `limit`.
size_t cut_between_words(std::string_view text, size_t limit);

}  // namespace trireme::text
