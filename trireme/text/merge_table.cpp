#include "trireme/text/merge_table.h"

#include <utility>

namespace trireme::text {

void MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  if (2 * (used_ + 1) > slots_.size()) grow();
  put(key_of(left, right), merge);
}

void MergeTable::put(uint64_t key, Merge merge) {
  size_t i = place_of(key);
  while (slots_[i].key != kEmpty && slots_[i].key != key) i = (i + 1) & (slots_.size() - 1);
  if (slots_[i].key == kEmpty) ++used_;
  slots_[i] = {key, merge};
}

void MergeTable::grow() {
  std::vector<Slot> old(2 * slots_.size());
  std::swap(old, slots_);
  used_ = 0;
  for (const Slot& slot : old) {
    if (slot.key != kEmpty) put(slot.key, slot.merge);
  }
}

}  // namespace trireme::text
