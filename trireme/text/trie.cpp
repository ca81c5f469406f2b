#include "trireme/text/trie.h"

namespace trireme::text {

void Trie::insert(std::string_view text, int32_t value) {
  if (text.empty()) return;
  int32_t node = kRoot;
  for (const char byte : text) {
    int32_t next = child(node, byte);
    if (next == kNone) {
      next = static_cast<int32_t>(values_.size());
      values_.push_back(kNone);
      edges_.insert(node, static_cast<unsigned char>(byte), {0, next});
    }
    node = next;
  }
  int32_t& place = values_[static_cast<size_t>(node)];
  if (place == kNone) place = value;
}

}  // namespace trireme::text
