#pragma once
// Text to token ids and back.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/choices.h"

namespace trireme::data {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;
  virtual int64_t vocab_size() const = 0;
  /// The token between two documents of a packed corpus.
  virtual int32_t document_separator() const = 0;
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// Ids outside the vocabulary throw DataError.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

/// kByte: one token a byte, vocabulary 256; documents are separated by the zero byte, which text does not
/// use.
std::unique_ptr<Tokenizer> make_tokenizer(plan::Tokenizer kind);

}  // namespace trireme::data
