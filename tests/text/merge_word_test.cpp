#include "trireme/text/merge_word.h"

#include <gtest/gtest.h>

#include "trireme/base/hash.h"

namespace trireme::text {
namespace {

/// The definition: while a merge applies, take the one of the lowest rank, and of equal ones the leftmost.
std::vector<int32_t> merged_by_definition(const MergeTable& merges, std::vector<int32_t> ids) {
  while (true) {
    size_t best = ids.size();
    Merge merge{kNoMerge, 0};
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const Merge here = merges.find(ids[i], ids[i + 1]);
      if (here.rank < merge.rank) {
        best = i;
        merge = here;
      }
    }
    if (best == ids.size()) return ids;
    ids[best] = merge.id;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}

TEST(MergeWord, IsItsDefinitionForWordsOfAllLengths) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    MergeTable merges;
    for (int32_t rank = 0; rank < 40; ++rank) {
      const auto at = static_cast<uint64_t>(rank);
      const auto part = [&](uint64_t side) {
        return static_cast<int32_t>(mix64(seed, 2 * at + side) % (4 + at));
      };
      merges.insert(part(0), part(1), {rank, 4 + rank});
    }
    std::vector<int32_t> ids(2, 7);  // what stands before a word stays
    for (uint64_t i = 0; i < seed; ++i) ids.push_back(static_cast<int32_t>(mix64(seed + 1000, i) % 4));
    const std::vector<int32_t> word(ids.begin() + 2, ids.end());
    merge_word(merges, ids, 2);
    EXPECT_EQ(ids[0], 7);
    EXPECT_EQ(std::vector<int32_t>(ids.begin() + 2, ids.end()), merged_by_definition(merges, word)) << seed;
  }
}

}  // namespace
}  // namespace trireme::text
