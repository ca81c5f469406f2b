#include "trireme/text/merge_word.h"

#include <algorithm>
#include <array>
#include <queue>

namespace trireme::text {
namespace {

constexpr size_t kShortWord = 64;  // up to here it is faster to look at all pairs than to keep them in order

/// `ids` are `count` tokens. Returns how many are left.
size_t merge_short(const MergeTable& merges, int32_t* ids, size_t count) {
  std::array<Merge, kShortWord> pairs;  // of ids[i] and ids[i + 1]
  for (size_t i = 0; i + 1 < count; ++i) pairs[i] = merges.find(ids[i], ids[i + 1]);
  while (count > 1) {
    const auto end = pairs.begin() + static_cast<ptrdiff_t>(count - 1);
    const auto best =
        std::min_element(pairs.begin(), end, [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
    if (best->rank == kNoMerge) break;
    const auto i = static_cast<size_t>(best - pairs.begin());
    ids[i] = best->id;
    std::copy(ids + i + 2, ids + count, ids + i + 1);
    std::copy(best + 1, end, best);
    --count;
    if (i > 0) pairs[i - 1] = merges.find(ids[i - 1], ids[i]);
    if (i + 1 < count) pairs[i] = merges.find(ids[i], ids[i + 1]);
  }
  return count;
}

/// A token of a long word in a list, from which merged ones are taken out.
struct Link {
  int32_t id;
  int32_t previous, next;  ///< places; -1: none
};

struct Candidate {
  int32_t rank;
  int32_t place;  ///< of the left token
  int32_t left, right;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : place > other.place;
  }
};

class LongWord {
 public:
  LongWord(const MergeTable& merges, const int32_t* ids, size_t count) : merges_(merges) {
    const auto last = static_cast<int32_t>(count) - 1;
    links_.reserve(count);
    for (int32_t i = 0; i <= last; ++i) links_.push_back({ids[i], i - 1, i == last ? -1 : i + 1});
    for (int32_t i = 0; i < last; ++i) consider(i);
  }

  void merge_all() {
    while (!candidates_.empty()) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      if (holds(best)) merge(best);
    }
  }

  /// Writes the tokens that are left to `ids`; returns how many.
  size_t write(int32_t* ids) const {
    size_t count = 0;
    for (int32_t i = 0; i != -1; i = links_[static_cast<size_t>(i)].next) {
      ids[count++] = links_[static_cast<size_t>(i)].id;
    }
    return count;
  }

 private:
  static constexpr int32_t kTaken = -1;  // the id of a token that is part of the one before it

  Link& at(int32_t place) { return links_[static_cast<size_t>(place)]; }

  void consider(int32_t place) {
    if (place == -1 || at(place).next == -1) return;
    const int32_t left = at(place).id, right = at(at(place).next).id;
    const Merge merge = merges_.find(left, right);
    if (merge.rank != kNoMerge) candidates_.push({merge.rank, place, left, right});
  }

  /// Whether no other merge has changed one of the two since.
  bool holds(const Candidate& candidate) {
    const Link& link = at(candidate.place);
    return link.id == candidate.left && link.next != -1 && at(link.next).id == candidate.right;
  }

  void merge(const Candidate& candidate) {
    Link& left = at(candidate.place);
    Link& right = at(left.next);
    left.id = merges_.find(candidate.left, candidate.right).id;
    left.next = right.next;
    right.id = kTaken;
    if (left.next != -1) at(left.next).previous = candidate.place;
    consider(left.previous);
    consider(candidate.place);
  }

  const MergeTable& merges_;
  std::vector<Link> links_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates_;
};

}  // namespace

void merge_word(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin) {
  int32_t* word = ids.data() + begin;
  size_t count = ids.size() - begin;
  if (count <= kShortWord) {
    count = merge_short(merges, word, count);
  } else {
    LongWord links(merges, word, count);
    links.merge_all();
    count = links.write(word);
  }
  ids.resize(begin + count);
}

}  // namespace trireme::text
