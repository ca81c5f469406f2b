#pragma once
// Which text of a corpus is held out for validation: exactly the share that was asked for, in bytes.
// Documents are drawn by a hash of their place, the lowest draws first, and the one with which the share is
// reached is cut in two.
#include <cstddef>
#include <cstdint>
#include <queue>
#include <string_view>
#include <vector>

namespace trireme::data {

/// The draw of document `index` of file `name`. It depends on the name alone, so that files which are added
/// move few documents from one split to the other.
uint64_t held_out_draw(std::string_view name, size_t index);

/// A document's place in the order in which documents are held out: by draw, equal draws in source order.
struct DrawnDocument {
  uint64_t draw = 0;
  int64_t ordinal = 0;  ///< counts the documents of the source
  auto operator<=>(const DrawnDocument&) const = default;
};

/// Documents below `last` are held out whole, and of `last` itself its final `last_bytes`.
struct HeldOut {
  DrawnDocument last;
  int64_t last_bytes = 0;  ///< 0: nothing is held out
  int64_t bytes = 0;       ///< held out in all

  /// How many bytes at the end of a document are held out: none, all `size`, or where it is cut.
  int64_t bytes_of(const DrawnDocument& document, int64_t size) const;
};

/// Chooses in one pass, with room for the documents that are held out and no others.
class HeldOutChooser {
 public:
  /// `val_fraction` in [0, 1) of documents that have at most `most_bytes` together.
  HeldOutChooser(double val_fraction, int64_t most_bytes);
  void add(uint64_t draw, int64_t bytes);
  /// val_fraction of the bytes that were added, to the nearest byte.
  HeldOut choose();

 private:
  struct Candidate {
    DrawnDocument document;
    int64_t bytes = 0;
    bool operator<(const Candidate& other) const { return document < other.document; }
  };
  /// Drops candidates that are not needed for `bytes`.
  void shrink_to(int64_t bytes);

  double val_fraction_;
  int64_t most_held_out_;
  std::priority_queue<Candidate> candidates_;  ///< the lowest draws; the highest of them on top
  int64_t candidate_bytes_ = 0, bytes_ = 0, documents_ = 0;
};

}  // namespace trireme::data
