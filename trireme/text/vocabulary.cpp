#include "trireme/text/vocabulary.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/utf8.h"

namespace trireme::text {

size_t StringHash::operator()(std::string_view text) const {
  return xxh3(text);
}

void Vocabulary::add(std::string_view token, int64_t id, const std::string& where) {
  if (id < 0 || id >= kMostTokens) {
    throw DataError("[text.vocabulary] {}: token '{}' has the id {}, outside [0, {}); get the file again",
                    where, printable_line(token), id, kMostTokens);
  }
  if (tokens_.size() <= static_cast<size_t>(id)) tokens_.resize(static_cast<size_t>(id) + 1, nullptr);
  const std::string*& place = tokens_[static_cast<size_t>(id)];
  if (place != nullptr && *place != token) {
    throw DataError("[text.vocabulary] {}: tokens '{}' and '{}' both have the id {}; get the file again",
                    where, printable_line(*place), printable_line(token), id);
  }
  place = &ids_.insert_or_assign(std::string(token), static_cast<int32_t>(id)).first->first;
}

std::optional<int32_t> Vocabulary::find(std::string_view token) const {
  const auto found = ids_.find(token);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string_view> Vocabulary::token(int32_t id) const {
  if (id < 0 || id >= size() || tokens_[static_cast<size_t>(id)] == nullptr) return std::nullopt;
  return *tokens_[static_cast<size_t>(id)];
}

Vocabulary vocabulary_from(const JsonView& json) {
  if (!json.value().is_object()) json.refuse_type("an object of tokens and ids");
  Vocabulary vocabulary;
  for (const auto& [token, id] : json.value().items()) {
    const int64_t value =
        id.is_number_unsigned() && id.get<uint64_t>() < kMostTokens ? id.get<int64_t>() : -1;
    vocabulary.add(token, value, json.where());
  }
  return vocabulary;
}

std::string byte_token(unsigned char byte) {
  return fmt::format("<0x{:02X}>", byte);
}

std::optional<std::vector<int32_t>> byte_ids(const Vocabulary& vocabulary, std::string_view text) {
  std::vector<int32_t> ids;
  for (const char byte : text) {
    const auto id = vocabulary.find(byte_token(static_cast<unsigned char>(byte)));
    if (!id) return std::nullopt;
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace trireme::text
