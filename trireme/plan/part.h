#pragma once
// The part of a parameter that a rank holds: a box of it, or all. Checkpoints, initial values and digests
// know the whole parameter; flat buffers, gradients and kernels the box. The vocabulary of a head that is
// spread over a pipeline is cut so, and layers along tp are.
#include <cstdint>

#include "trireme/plan/region.h"

namespace trireme::plan {

/// The default is the parameter itself.
struct Part {
  Shape whole = {};  ///< the shape of the parameter that this is a box of; empty: there is no larger one
  Shape start = {};  ///< where the box begins in it, or in `view`, one number a dimension
  /// Where a dimension of a parameter has several matrices side by side, and the box has the same places of
  /// each: the shape of the whole with those matrices as a dimension of their own, and the size of the box in
  /// it. Empty: the box has the dimensions of what is held.
  Shape view = {}, extent = {};
  /// Ranks along tp that hold these same elements and compute with them: the sum of their gradients is the
  /// parameter's, and all update it alike.
  int64_t copies = 1;
  /// Place among these ranks, or 1 for the copy of a tied parameter on a later stage. Copy 0 is saved, and
  /// its gradient counts in the norm.
  int64_t copy = 0;

  bool is_whole() const { return whole.empty(); }
  /// The shape of the whole parameter, of which `held` is here.
  const Shape& whole_of(const Shape& held) const { return is_whole() ? held : whole; }
  /// Elements `range` of what is held, in row-major order, within the whole parameter.
  Region region(const Shape& held, const Range& range) const;
  /// Place of the first element that is held in the whole parameter.
  int64_t first_element() const;
  bool operator==(const Part&) const = default;
};

/// The part of a whole parameter of this shape that has the rows `rows`.
Part part_of_rows(const Shape& whole, const Range& rows);

}  // namespace trireme::plan
