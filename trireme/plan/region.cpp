#include "trireme/plan/region.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <queue>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

int64_t product(const std::vector<int64_t>& numbers) {
  int64_t result = 1;
  for (const int64_t number : numbers) result *= number;
  return result;
}

/// Elements of the tensor from the first to behind the last of a region that is not empty.
Range hull(const Shape& tensor, const Region& region) {
  const Shape& shape = region.shape_in(tensor);
  int64_t stride = 1, first = 0, last = 0;
  int64_t begin = region.range.begin, end = region.range.end - 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    first += (region.start[dim] + begin % region.extent[dim]) * stride;
    last += (region.start[dim] + end % region.extent[dim]) * stride;
    begin /= region.extent[dim];
    end /= region.extent[dim];
    stride *= shape[dim];
  }
  return {first, last + 1};
}

}  // namespace

std::optional<int64_t> checked_numel(const Shape& shape) {
  int64_t numel = 1, strides = 1;  // strides are products, too, which a zero must not hide
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(numel, dim, &numel) ||
        __builtin_mul_overflow(strides, std::max<int64_t>(dim, 1), &strides))
      return std::nullopt;
  }
  return numel;
}

Region Region::whole(const Shape& shape) {
  return box(std::vector<int64_t>(shape.size(), 0), shape);
}

Region Region::flat(const Shape& shape, Range range) {
  return {std::vector<int64_t>(shape.size(), 0), shape, range};
}

Region Region::box(std::vector<int64_t> start, std::vector<int64_t> extent) {
  const int64_t numel = product(extent);
  return {std::move(start), std::move(extent), {0, numel}};
}

std::string misfit(const Region& region, const Shape& tensor) {
  const Shape& shape = region.shape_in(tensor);
  const auto say = [&](std::string_view what) {
    return fmt::format("box [{}] + [{}], elements {} to {}, {} of [{}]", fmt::join(region.start, ", "),
                       fmt::join(region.extent, ", "), region.range.begin, region.range.end, what,
                       fmt::join(shape, ", "));
  };
  if (!region.view.empty() && checked_numel(region.view) != checked_numel(tensor))
    return fmt::format("a view [{}] has not as many elements as [{}]", fmt::join(region.view, ", "),
                       fmt::join(tensor, ", "));
  if (region.start.size() != shape.size() || region.extent.size() != shape.size())
    return say("differs in the number of dimensions from that");
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    const int64_t start = region.start[dim], extent = region.extent[dim];
    if (start < 0 || extent < 0 || start > shape[dim] || extent > shape[dim] - start)
      return say("reaches outside the tensor");
  }
  const Range& range = region.range;
  if (range.begin < 0 || range.end < range.begin || range.end > product(region.extent))
    return say("has more elements than the box");
  return {};
}

RunCursor::RunCursor(const Shape& tensor, const Region& region)
    : at_(region.range.begin), end_(region.range.end), first_(region.range.begin) {
  if (at_ >= end_) return;
  const Shape& shape = region.shape_in(tensor);
  size_t rows = shape.size();  // dimensions that number rows; the others are whole, but for the first of them
  int64_t stride = 1;
  while (rows > 0) {
    --rows;
    row_ = stride * region.extent[rows];
    base_ += region.start[rows] * stride;
    stride *= shape[rows];
    if (region.extent[rows] != shape[rows]) break;
  }
  strides_.resize(rows);
  extent_.assign(region.extent.begin(), region.extent.begin() + static_cast<int64_t>(rows));
  for (size_t dim = rows; dim-- > 0;) {
    strides_[dim] = stride;
    base_ += region.start[dim] * stride;
    stride *= shape[dim];
  }
  place();
}

void RunCursor::place() {
  int64_t row = at_ / row_;
  const int64_t column = at_ % row_;
  int64_t begin = base_ + column;
  for (size_t dim = extent_.size(); dim-- > 0;) {
    begin += row % extent_[dim] * strides_[dim];
    row /= extent_[dim];
  }
  run_ = {begin, std::min(row_ - column, end_ - at_), at_ - first_};
}

void RunCursor::next() {
  at_ += run_.length;
  if (at_ < end_) {
    place();
  } else {
    run_.length = 0;
  }
}

void intersect(const Shape& shape, const Region& first, const Region& second,
               const std::function<void(int64_t, int64_t, int64_t)>& body) {
  if (first.numel() == 0 || second.numel() == 0) return;
  const Range common = intersect(hull(shape, first), hull(shape, second));
  if (common.size() == 0) return;
  RunCursor one(shape, first), other(shape, second);
  int64_t a = 0, b = 0, count = 0;  // not yet told
  while (!one.done() && !other.done()) {
    const Run &left = one.run(), &right = other.run();
    const int64_t begin = std::max(left.begin, right.begin), end = std::min(left.end(), right.end());
    if (begin < end) {
      const int64_t to_a = left.local + begin - left.begin, to_b = right.local + begin - right.begin;
      if (count > 0 && to_a == a + count && to_b == b + count) {
        count += end - begin;
      } else {
        if (count > 0) body(a, b, count);
        a = to_a, b = to_b, count = end - begin;
      }
    }
    left.end() <= right.end() ? one.next() : other.next();
  }
  if (count > 0) body(a, b, count);
}

std::string coverage_error(const Shape& shape, const std::vector<const Region*>& regions) {
  std::vector<RunCursor> cursors;
  for (const Region* region : regions) {
    if (region->numel() > 0) cursors.emplace_back(shape, *region);
  }
  int64_t runs = 0;
  for (const RunCursor& cursor : cursors) runs += std::min(cursor.count(), kMaxRuns);
  if (runs > kMaxRuns) return fmt::format("the parts are cut into more than {} runs", kMaxRuns);
  const auto later = [&](size_t a, size_t b) { return cursors[a].run().begin > cursors[b].run().begin; };
  std::priority_queue<size_t, std::vector<size_t>, decltype(later)> next(later);
  for (size_t i = 0; i < cursors.size(); ++i) next.push(i);
  int64_t covered = 0;
  while (!next.empty()) {
    const size_t index = next.top();
    next.pop();
    const Run run = cursors[index].run();
    if (run.begin > covered) return fmt::format("elements {} to {} are missing", covered, run.begin);
    if (run.begin < covered)
      return fmt::format("elements {} to {} occur twice", run.begin, std::min(covered, run.end()));
    covered = run.end();
    cursors[index].next();
    if (!cursors[index].done()) next.push(index);
  }
  const int64_t numel = product(shape);
  return covered == numel ? std::string() : fmt::format("elements {} to {} are missing", covered, numel);
}

Region share_of(const Region& region, int64_t index, int64_t count) {
  TRIREME_CHECK(0 <= index && index < count, "[checkpoint.region] there is no share {} of {}", index, count);
  Region share = region;
  const int64_t each = region.numel() / count, more = region.numel() % count;
  share.range.begin = region.range.begin + index * each + std::min(index, more);
  share.range.end = share.range.begin + each + (index < more ? 1 : 0);
  return share;
}

}  // namespace trireme::plan
