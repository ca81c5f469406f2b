#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "trireme/text/merge_table.h"

namespace trireme::text {

/// Merges neighbours in ids[begin...] until no merge applies: the one of the lowest rank first, and of equal
/// ones the leftmost (byte-pair encoding, Sennrich et al. 2016). Takes n log n steps for n ids.
void merge_word(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin);

}  // namespace trireme::text
