#include "trireme/text/charsmap.h"

#include <cstring>

#include "trireme/base/error.h"
#include "trireme/text/normal_form.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr size_t kLongestGrapheme = 6;  // in bytes; from here on characters are looked up one by one

// The parts of a unit of the double array.
bool has_leaf(uint32_t unit) {
  return (unit >> 8 & 1) != 0;
}
uint32_t value_of(uint32_t unit) {
  return unit & 0x7fffffff;
}
uint32_t label_of(uint32_t unit) {
  return unit & 0x800000ff;
}
uint32_t offset_of(uint32_t unit) {
  return unit >> 10 << ((unit & 0x200) >> 6);
}

}  // namespace

Charsmap::Charsmap(std::string_view bytes, const std::string& where) {
  if (bytes.empty()) return;
  uint32_t trie_bytes = 0;
  if (bytes.size() >= sizeof trie_bytes) std::memcpy(&trie_bytes, bytes.data(), sizeof trie_bytes);
  const bool fits = trie_bytes != 0 && trie_bytes % 4 == 0 && trie_bytes <= bytes.size() - sizeof trie_bytes;
  if (bytes.size() < sizeof trie_bytes || !fits) {
    throw DataError(
        "[text.charsmap] {} has {} bytes and says that {} of them are its trie; get the file again", where,
        bytes.size(), trie_bytes);
  }
  units_.resize(trie_bytes / 4);
  std::memcpy(units_.data(), bytes.data() + sizeof trie_bytes, trie_bytes);
  texts_ = bytes.substr(sizeof trie_bytes + trie_bytes);
}

std::optional<Charsmap::Entry> Charsmap::find(std::string_view text, bool longest) const {
  std::optional<Entry> found;
  size_t node = offset_of(units_[0]);
  for (size_t i = 0; i < text.size() && (longest || !found); ++i) {
    const uint32_t label = static_cast<unsigned char>(text[i]);
    node ^= label;
    if (label == 0 || node >= units_.size() || label_of(units_[node]) != label) break;
    const uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (node >= units_.size() || value_of(units_[node]) >= texts_.size()) break;
    const std::string_view rest = std::string_view(texts_).substr(value_of(units_[node]));
    found = {i + 1, rest.substr(0, rest.find('\0'))};
  }
  return found;
}

void Charsmap::append(std::string& result, std::string_view grapheme) const {
  if (grapheme.size() < kLongestGrapheme) {
    if (const auto entry = find(grapheme, false)) {
      result += entry->replacement;
      return;
    }
  }
  for (size_t i = 0; i < grapheme.size();) {
    const std::string_view character = grapheme.substr(i, character_length(grapheme[i]));
    const auto entry = find(character, false);
    result += entry ? entry->replacement : character;
    i += character.size();
  }
}

std::optional<Charsmap::Entry> Charsmap::longest(std::string_view text) const {
  return units_.empty() ? std::nullopt : find(text, true);
}

std::string Charsmap::apply(std::string_view text) const {
  if (units_.empty()) return std::string(text);
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = grapheme_length(text);
    append(result, text.substr(0, length));
    text.remove_prefix(length);
  }
  return result;
}

}  // namespace trireme::text
