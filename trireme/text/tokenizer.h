#pragma once
// Text to token ids and back, as Python's `tokenizers` does it for the same file: added tokens are found,
// what is between them is normalised and cut into words, a model encodes each word, and a template puts
// special tokens around.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/added_tokens.h"
#include "trireme/text/decoder.h"
#include "trireme/text/model.h"
#include "trireme/text/normalizer.h"
#include "trireme/text/post_processor.h"
#include "trireme/text/pre_tokenizer.h"
#include "trireme/text/word_cache.h"

namespace trireme::text {

/// The parts of a tokenizer; each file format fills these.
struct TokenizerParts {
  std::string name;  ///< for messages: the path that it was read from
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Model model;
  AddedTokens added;
  PostProcessor post_processor;
  Decoder decoder;
};

/// Immutable: threads may share one.
class Tokenizer {
 public:
  explicit Tokenizer(TokenizerParts parts);

  const std::string& name() const { return parts_.name; }
  /// One more than the largest id.
  int64_t vocab_size() const;
  /// The token with this text as its content, added or of the model.
  std::optional<int32_t> find(std::string_view token) const;
  /// The special token with this text.
  std::optional<int32_t> find_special(std::string_view token) const;
  bool is_special(int32_t id) const;
  /// The content of a token that was added, such as a special one; nothing for another one.
  std::optional<std::string_view> added_token(int32_t id) const { return parts_.added.content(id); }
  /// The token for what no other token spells, where the model has one.
  std::optional<int32_t> unknown_token() const;

  /// The ids of `text`; bytes that are no UTF-8 count as U+FFFD. `special` puts special tokens around, as the
  /// file says. Truncation and padding that a file may ask for are for batches, and not done. An Encoder is
  /// faster for many texts.
  std::vector<int32_t> encode(std::string_view text, bool special = false) const;

  /// The text of `ids`, without special tokens unless `special`. Throws DataError for an id outside [0,
  /// vocab_size()); one in a gap of the vocabulary is no text.
  std::string decode(std::span<const int32_t> ids, bool special = false) const;

 private:
  friend class Encoder;
  TokenizerParts parts_;
};

/// Encodes many texts in one thread: it remembers words, in about 4 MiB.
class Encoder {
 public:
  /// `tokenizer` must outlive the encoder.
  explicit Encoder(const Tokenizer& tokenizer)
      : parts_(tokenizer.parts_), cache_(std::make_unique<WordCache>()) {}

  /// Appends the ids of `text`, as Tokenizer::encode() without special tokens.
  void encode(std::string_view text, std::vector<int32_t>& ids);

 private:
  friend class Tokenizer;
  Encoder(const Tokenizer& tokenizer, std::unique_ptr<WordCache> cache)
      : parts_(tokenizer.parts_), cache_(std::move(cache)) {}
  void encode_between(std::string_view text, bool starts_input, std::vector<int32_t>& ids);
  void encode_words(std::string text, bool starts_input, std::vector<int32_t>& ids);

  const TokenizerParts& parts_;
  std::unique_ptr<WordCache> cache_;  ///< may be absent
};

/// encode() of each text, on up to `threads` threads.
std::vector<std::vector<int32_t>> encode_batch(const Tokenizer& tokenizer,
                                               std::span<const std::string_view> texts, int64_t threads);

}  // namespace trireme::text
