#pragma once
// The tokens of words that were seen before. A slot for each value of a hash: a word takes the place of
// another one, so that memory is bounded and nothing is ever searched.
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "trireme/base/hash.h"

namespace trireme::text {

class WordCache {
 public:
  WordCache() : slots_(kSlots) {}

  /// Calls encode(word, ids), which appends to `ids`, unless the word is known; appends what it appended
  /// then.
  template <typename Encode>
  void encode(std::string_view word, std::vector<int32_t>& ids, Encode encode) {
    if (word.size() > kLongestWord) {
      encode(word, ids);
      return;
    }
    Slot& slot = slots_[xxh3(word) & (kSlots - 1)];
    if (slot.holds(word)) {
      ids.insert(ids.end(), slot.ids.begin(), slot.ids.begin() + slot.count);
      return;
    }
    const size_t begin = ids.size();
    encode(word, ids);
    slot.keep(word, std::span(ids).subspan(begin));
  }

 private:
  static constexpr size_t kSlots = size_t{1} << 16;  // of 64 bytes, a line of the processor's cache
  static constexpr size_t kLongestWord = 30;         // in bytes
  static constexpr size_t kMostIds = 8;

  struct alignas(64) Slot {
    uint8_t size = 0;
    uint8_t count = 0;
    std::array<char, kLongestWord> word;
    std::array<int32_t, kMostIds> ids;

    bool holds(std::string_view other) const {
      return size == other.size() && std::memcmp(word.data(), other.data(), size) == 0;
    }
    void keep(std::string_view other, std::span<const int32_t> tokens) {
      if (tokens.size() > kMostIds || other.empty()) return;
      size = static_cast<uint8_t>(other.size());
      count = static_cast<uint8_t>(tokens.size());
      std::memcpy(word.data(), other.data(), other.size());
      std::memcpy(ids.data(), tokens.data(), tokens.size_bytes());
    }
  };

  std::vector<Slot> slots_;
};

}  // namespace trireme::text
