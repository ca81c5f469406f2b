#include "trireme/plan/part.h"

namespace trireme::plan {

Region Part::region(const Shape& held, const Range& range) const {
  return {is_whole() ? Shape(held.size(), 0) : start, view.empty() ? held : extent,
          range.size() > 0 ? range : Range{}, view};
}

int64_t Part::first_element() const {
  const Shape& dims = view.empty() ? whole : view;
  int64_t element = 0;
  for (size_t dim = 0; dim < dims.size(); ++dim) element = element * dims[dim] + start[dim];
  return element;
}

Part part_of_rows(const Shape& whole, const Range& rows) {
  Part part{.whole = whole, .start = Shape(whole.size(), 0)};
  part.start.front() = rows.begin;
  return part;
}

}  // namespace trireme::plan
