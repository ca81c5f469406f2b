#pragma once
// Parts of tensors, as plain numbers: what a rank holds, what a file stores, what a reader wants. Every way
// of sharding is a region (a flat range of elements, a box, a flat range within a box), and all that saving
// and loading need of a layout is which regions cover a tensor and where two of them meet.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace trireme::plan {

using Shape = std::vector<int64_t>;

/// A half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end > begin ? end - begin : 0; }
  bool operator==(const Range&) const = default;
};
inline Range intersect(const Range& a, const Range& b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

/// Elements of a shape, or none when they do not fit 63 bits or a dimension is negative.
std::optional<int64_t> checked_numel(const Shape& shape);

/// A range of the elements of a box of a tensor, both in row-major order. Its own elements are numbered from
/// 0 in that order: that is how a file stores them and how a buffer for them is laid out.
struct Region {
  std::vector<int64_t> start, extent;  ///< the box, one number a dimension
  Range range;                         ///< of the box's elements
  /// The shape that the box is one of, with as many elements as the tensor: (d, 3, d) for some heads of each
  /// of the queries, keys and values that a tensor (d, 3 d) has side by side. Empty: that of the tensor.
  Shape view = {};

  const Shape& shape_in(const Shape& tensor) const { return view.empty() ? tensor : view; }

  static Region whole(const Shape& shape);
  /// Elements [begin, end) of a tensor.
  static Region flat(const Shape& shape, Range range);
  static Region box(std::vector<int64_t> start, std::vector<int64_t> extent);

  int64_t numel() const { return range.size(); }
  bool operator==(const Region&) const = default;
};

/// The reason why `region` is no part of a tensor of this shape; empty: it is one.
std::string misfit(const Region& region, const Shape& tensor);

/// Elements [begin, begin + length) of a tensor that a region has as its own from number `local` on.
struct Run {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t local = 0;
  int64_t end() const { return begin + length; }
};

/// The runs of a region in ascending order, without a list of them.
class RunCursor {
 public:
  /// `region` must fit `tensor`; both may go afterwards.
  RunCursor(const Shape& tensor, const Region& region);
  bool done() const { return run_.length == 0; }
  const Run& run() const { return run_; }
  /// Runs in all, or one more.
  int64_t count() const { return row_ > 0 ? (end_ - first_) / row_ + 2 : 0; }
  void next();

 private:
  void place();

  std::vector<int64_t> strides_, extent_;  ///< of the dimensions that number rows
  int64_t base_ = 0;                       ///< element of the tensor that the box begins with
  int64_t row_ = 1;                        ///< elements that follow each other in the tensor
  int64_t at_ = 0, end_ = 0, first_ = 0;   ///< elements of the box
  Run run_;
};

/// Calls body(a, b, count) for each run of elements that both have: they are those from number `a` on of
/// `first` and from number `b` on of `second`. Neighbours come as one.
void intersect(const Shape& shape, const Region& first, const Region& second,
               const std::function<void(int64_t a, int64_t b, int64_t count)>& body);

/// Runs that the regions of a tensor may have in all. A 400B model that 8 tensor ranks share has some 16384
/// for each of its matrices; without a limit a file of megabytes could keep its reader busy for days.
inline constexpr int64_t kMaxRuns = int64_t{1} << 26;

/// The reason why `regions` do not cover every element of `shape` exactly once; empty: they do.
std::string coverage_error(const Shape& shape, const std::vector<const Region*>& regions);

/// The part of `region` that replica `index` of `count` writes when all of them hold it: the parts of all are
/// equal within one element, and cover it.
Region share_of(const Region& region, int64_t index, int64_t count);

}  // namespace trireme::plan
