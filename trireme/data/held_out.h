#pragma once
// Which text of a corpus is held out for validation: exactly the share that was asked for, in bytes.
// Documents are drawn by a hash of their place, the lowest draws first, and the one with which the share is
// reached is cut in two. Draws count by their first bits, so that memory is the same for any number of
// documents; those that agree in these are held out in source order.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace trireme::data {

/// The draw of document `index` of file `name`. It depends on the name alone, so that files which are added
/// move few documents from one split to the other.
uint64_t held_out_draw(std::string_view name, size_t index);

/// Says of the documents of a source, one after another, how much of each is held out.
class HeldOut {
 public:
  /// Nothing is held out.
  HeldOut() = default;
  /// Documents whose draws are below those of group `last_group` are held out whole; of that group, the first
  /// `of_last_group` bytes in source order.
  HeldOut(size_t last_group, int64_t of_last_group) : last_group_(last_group), left_(of_last_group) {}

  /// How many bytes at the end of the next document are held out: none, all `size`, or where it is cut.
  int64_t take(uint64_t draw, int64_t size);

 private:
  size_t last_group_ = 0;
  int64_t left_ = 0;  ///< bytes of last_group_ that are still to be held out
};

/// Chooses in one pass over the documents, in source order.
class HeldOutChooser {
 public:
  /// `val_fraction` in [0, 1).
  explicit HeldOutChooser(double val_fraction);
  void add(uint64_t draw, int64_t bytes);
  /// val_fraction of the bytes that were added, to the nearest byte.
  HeldOut choose() const;

 private:
  double val_fraction_;
  std::vector<int64_t> group_bytes_;  ///< of all documents whose draws begin with the same bits
  int64_t bytes_ = 0;                 ///< of all documents
};

}  // namespace trireme::data
