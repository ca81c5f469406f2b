#pragma once
// Texts by their bytes, so that all that a place in a text begins with are found in one walk.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "trireme/text/merge_table.h"

namespace trireme::text {

class Trie {
 public:
  /// A text that is there already keeps its first value. Empty texts are not kept.
  void insert(std::string_view text, int32_t value);

  /// Calls found(length, value) for each text that `text` begins with, the shortest first.
  template <typename Found>
  void prefixes(std::string_view text, Found found) const {
    int32_t node = kRoot;
    for (size_t i = 0; i < text.size(); ++i) {
      node = child(node, text[i]);
      if (node == kNone) return;
      if (const int32_t value = values_[static_cast<size_t>(node)]; value != kNone) found(i + 1, value);
    }
  }

  /// The length of the longest text that `text` begins with; 0: there is none.
  size_t longest_prefix(std::string_view text) const {
    size_t longest = 0;
    prefixes(text, [&](size_t length, int32_t) { longest = length; });
    return longest;
  }

 private:
  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kNone = -1;

  int32_t child(int32_t node, char byte) const {
    const Merge edge = edges_.find(node, static_cast<unsigned char>(byte));
    return edge.rank == kNoMerge ? kNone : edge.id;
  }

  MergeTable edges_;  // (node, byte) to node
  std::vector<int32_t> values_ = {kNone};
};

}  // namespace trireme::text
