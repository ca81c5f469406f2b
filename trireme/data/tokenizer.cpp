#include "trireme/data/tokenizer.h"

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config.h"
#include "trireme/text/load.h"

namespace trireme::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return plan::kByteTokenizer; }
  std::string digest() const override { return plan::kByteTokenizer; }
  int64_t vocab_size() const override { return 256; }
  int32_t document_separator() const override { return 0; }
  std::optional<int32_t> end_token() const override { return std::nullopt; }
  bool is_special(int32_t) const override { return false; }
  std::string special_text(int32_t) const override { return {}; }
  std::optional<int32_t> unknown_token() const override { return std::nullopt; }
  bool cuts_anywhere() const override { return true; }
  std::unique_ptr<const Tokenizer> for_another_thread() const override {
    return std::make_unique<ByteTokenizer>();
  }

  std::vector<int32_t> encode(std::string_view text) const override {
    const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    text.reserve(ids.size());
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size()) {
        throw DataError(
            "[data.tokenizer] token {} is outside the byte vocabulary of 256; decode with the tokenizer "
            "that the model was trained with",
            id);
      }
      text += static_cast<char>(id);
    }
    return text;
  }
};

class FileTokenizer final : public Tokenizer {
 public:
  explicit FileTokenizer(const std::string& path)
      : digest_(text::tokenizer_digest(path)),
        name_(text::tokenizer_name(path, digest_)),
        tokenizer_(std::make_shared<const text::Tokenizer>(text::load_tokenizer(path))),
        encoder_(*tokenizer_),
        end_(text::end_token(*tokenizer_)) {}
  /// Shares the immutable part, and remembers words of its own.
  FileTokenizer(const FileTokenizer& other)
      : digest_(other.digest_),
        name_(other.name_),
        tokenizer_(other.tokenizer_),
        encoder_(*tokenizer_),
        end_(other.end_) {}
  FileTokenizer& operator=(const FileTokenizer&) = delete;

  std::string name() const override { return name_; }
  std::string digest() const override { return digest_; }
  int64_t vocab_size() const override { return tokenizer_->vocab_size(); }
  int32_t document_separator() const override { return end_; }
  std::optional<int32_t> end_token() const override { return end_; }
  bool is_special(int32_t id) const override { return tokenizer_->is_special(id); }
  std::string special_text(int32_t id) const override {
    return std::string(tokenizer_->added_token(id).value_or(""));
  }
  std::optional<int32_t> unknown_token() const override { return tokenizer_->unknown_token(); }
  bool cuts_anywhere() const override { return false; }
  std::unique_ptr<const Tokenizer> for_another_thread() const override {
    return std::make_unique<FileTokenizer>(*this);
  }

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    encoder_.encode(text, ids);
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override { return tokenizer_->decode(ids); }

 private:
  std::string digest_, name_;
  std::shared_ptr<const text::Tokenizer> tokenizer_;
  mutable text::Encoder encoder_;  ///< remembers words, which changes no result
  int32_t end_;
};

}  // namespace

std::unique_ptr<const Tokenizer> make_tokenizer(const std::string& what) {
  if (what == plan::kByteTokenizer) return std::make_unique<ByteTokenizer>();
  return std::make_unique<FileTokenizer>(what);
}

std::string decode_after(const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                         std::span<const int32_t> ids) {
  std::vector<int32_t> both(prompt.begin(), prompt.end());
  both.insert(both.end(), ids.begin(), ids.end());
  const std::string before = tokenizer.decode(prompt), whole = tokenizer.decode(both);
  // A prompt that ends inside a character shows that as U+FFFD, until the character is complete.
  return whole.starts_with(before) ? whole.substr(before.size()) : tokenizer.decode(ids);
}

}  // namespace trireme::data
