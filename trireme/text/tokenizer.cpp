#include "trireme/text/tokenizer.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/base/threads.h"
#include "trireme/base/utf8.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

/// Words in GPT-2's alphabet are twice as long as bytes, and each has to be made: where that alphabet is the
/// last step before a model of it, the model takes bytes.
void prefer_bytes(TokenizerParts& parts) {
  auto* bpe = std::get_if<Bpe>(&parts.model);
  if (bpe == nullptr || !bpe->can_take_bytes() || parts.pre_tokenizer.empty()) return;
  auto* byte_level = std::get_if<ByteLevel>(&parts.pre_tokenizer.back());
  if (byte_level == nullptr) return;
  byte_level->spells_bytes = false;
  bpe->take_bytes();
}

}  // namespace

Tokenizer::Tokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
  prefer_bytes(parts_);
}

int64_t Tokenizer::vocab_size() const {
  return std::max(vocabulary_of(parts_.model).size(), parts_.added.id_end());
}

std::optional<int32_t> Tokenizer::find(std::string_view token) const {
  const auto added = parts_.added.find(token);
  return added ? added : vocabulary_of(parts_.model).find(token);
}

std::optional<int32_t> Tokenizer::find_special(std::string_view token) const {
  return parts_.added.is_special(token) ? parts_.added.find(token) : std::nullopt;
}

bool Tokenizer::is_special(int32_t id) const {
  const auto content = parts_.added.content(id);
  return content && parts_.added.is_special(*content);
}

std::optional<int32_t> Tokenizer::unknown_token() const {
  return std::visit([](const auto& kind) { return kind.unknown_token(); }, parts_.model);
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool special) const {
  std::vector<int32_t> ids;
  Encoder(*this, nullptr).encode(text, ids);
  return special ? post_process(parts_.post_processor, std::move(ids)) : ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool special) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      throw DataError(
          "[text.tokenizer] token {} is outside the vocabulary of {} of {}; decode with the tokenizer that "
          "the model was trained with",
          id, vocab_size(), name());
    }
    const auto added = parts_.added.content(id);
    const auto token = added ? added : vocabulary_of(parts_.model).token(id);
    if (token && (special || !parts_.added.is_special(*token))) tokens.emplace_back(*token);
  }
  return text::decode(parts_.decoder, std::move(tokens));
}

void Encoder::encode(std::string_view text, std::vector<int32_t>& ids) {
  std::string valid;
  if (!is_utf8(text)) {
    valid = replace_invalid(text);
    text = valid;
  }
  for (const Part& part : parts_.added.in_raw_text().split(text)) {
    if (part.token) {
      ids.push_back(*part.token);
    } else {
      encode_between(part.span.of(text), part.span.begin == 0, ids);
    }
  }
}

void Encoder::encode_between(std::string_view text, bool starts_input, std::vector<int32_t>& ids) {
  std::string normalized = normalize(parts_.normalizer, text);
  if (!is_utf8(normalized))
    normalized = replace_invalid(normalized);  // a file's map of characters may do that
  for (const Part& part : parts_.added.in_normalized_text().split(normalized)) {
    if (part.token) {
      ids.push_back(*part.token);
    } else {
      encode_words(std::string(part.span.of(normalized)), starts_input && part.span.begin == 0, ids);
    }
  }
}

void Encoder::encode_words(std::string text, bool starts_input, std::vector<int32_t>& ids) {
  Pieces pieces{.text = std::move(text), .words = {}, .starts_input = starts_input};
  pieces.words.push_back({0, pieces.text.size()});
  pre_tokenize(parts_.pre_tokenizer, pieces);
  std::visit(
      [&](const auto& model) {
        const auto encode_word = [&](std::string_view word, std::vector<int32_t>& out) {
          model.encode(word, out);
        };
        for (const Span& span : pieces.words) {
          const std::string_view word = span.of(pieces.text);
          cache_ ? cache_->encode(word, ids, encode_word) : encode_word(word, ids);
        }
      },
      parts_.model);
}

std::vector<std::vector<int32_t>> encode_batch(const Tokenizer& tokenizer,
                                               std::span<const std::string_view> texts, int64_t threads) {
  std::vector<std::vector<int32_t>> ids(texts.size());
  std::atomic<size_t> next = 0;
  std::exception_ptr failure;
  std::mutex failing;
  const auto work = [&] {
    try {
      Encoder encoder(tokenizer);
      for (size_t i = next++; i < texts.size(); i = next++) encoder.encode(texts[i], ids[i]);
    } catch (...) {
      const std::lock_guard lock(failing);
      failure = std::current_exception();
      next = texts.size();
    }
  };
  {
    std::vector<std::jthread> helpers;  // which are joined in any case
    const int64_t most = std::min(threads, static_cast<int64_t>(texts.size()));
    start_threads(most - 1, 0, [&] { helpers.emplace_back(work); });
    work();
  }
  if (failure) std::rethrow_exception(failure);
  return ids;
}

}  // namespace trireme::text
