#pragma once
// Text to token ids and back.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::data {

/// Not for several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  /// For people: "byte", or "gpt2.json (0123456789abcdef)".
  virtual std::string name() const = 0;
  /// Equal for tokenizers that make the same tokens: "byte", or a hash of the contents of its files.
  virtual std::string digest() const = 0;
  virtual int64_t vocab_size() const = 0;
  /// The token between two documents of a packed corpus.
  virtual int32_t document_separator() const = 0;
  /// The token that ends a text which is generated, if one does.
  virtual std::optional<int32_t> end_token() const = 0;
  /// Whether decode() leaves the token out.
  virtual bool is_special(int32_t id) const = 0;
  /// The text that stands for a special token.
  virtual std::string special_text(int32_t id) const = 0;
  /// The token for what no other token spells, if there is one.
  virtual std::optional<int32_t> unknown_token() const = 0;
  /// Whether the ids of a text are those of its parts one after another, wherever it is cut.
  virtual bool cuts_anywhere() const = 0;
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// The same tokenizer for another thread; what can be shared is.
  virtual std::unique_ptr<const Tokenizer> for_another_thread() const = 0;
  /// Without special tokens. Ids outside the vocabulary throw DataError.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

/// "byte": one token a byte, vocabulary 256; documents are separated by the zero byte, which text does not
/// use. Else the path of a file or folder that text::load_tokenizer() takes, and the token that ends a
/// document separates documents. Throws as that, and ConfigError where there is no such token.
std::unique_ptr<const Tokenizer> make_tokenizer(const std::string& what);

/// The text that `ids` add to that of `prompt`. They alone may say less: some tokenizers drop the space that
/// a text begins with.
std::string decode_after(const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                         std::span<const int32_t> ids);

}  // namespace trireme::data
