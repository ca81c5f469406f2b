#include "trireme/data/tokenizer.h"

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 256; }
  int32_t document_separator() const override { return 0; }

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

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(plan::Tokenizer kind) {
  switch (kind) {
    case plan::Tokenizer::kByte:
      return std::make_unique<ByteTokenizer>();
  }
  throw LogicError("[data.tokenizer] tokenizer {} has no class", static_cast<int>(kind));
}

}  // namespace trireme::data
