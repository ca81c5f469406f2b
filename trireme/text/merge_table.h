#pragma once
// The merges of a BPE model: which token two neighbours become, and how early it was learned.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme::text {

inline constexpr int32_t kNoMerge = INT32_MAX;

struct Merge {
  int32_t rank;  ///< the lower, the earlier; kNoMerge: there is none
  int32_t id;    ///< of the merged token
};

/// A hash table with open addressing, since a lookup is the innermost step of encoding.
class MergeTable {
 public:
  MergeTable() : slots_(kFewest) {}

  /// The merge of `left` and `right`; a later one takes the place of an earlier one.
  void insert(int32_t left, int32_t right, Merge merge);

  Merge find(int32_t left, int32_t right) const {
    const uint64_t key = key_of(left, right);
    for (size_t i = place_of(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return slots_[i].merge;
      if (slots_[i].key == kEmpty) return {kNoMerge, 0};
    }
  }

 private:
  static constexpr uint64_t kEmpty = UINT64_MAX;  // ids are not negative, so no pair has this key
  static constexpr size_t kFewest = 16;           // slots; always a power of two
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge = {kNoMerge, 0};
  };

  static uint64_t key_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  /// Fibonacci hashing (Knuth, The Art of Computer Programming 6.4): the high bits of the product are mixed
  /// best.
  size_t place_of(uint64_t key) const {
    return static_cast<size_t>((key ^ key >> 29) * 0x9e3779b97f4a7c15ULL >> 20) & (slots_.size() - 1);
  }
  void put(uint64_t key, Merge merge);
  void grow();

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

}  // namespace trireme::text
