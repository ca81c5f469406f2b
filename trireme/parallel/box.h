#pragma once
// Boxes of tensors, as plan::Region has them.
#include <ATen/core/Tensor.h>

#include "trireme/plan/region.h"

namespace trireme::parallel {

/// The box of `region` in a contiguous `whole`, as a view with the dimensions of the box. The range of the
/// region is another matter.
inline at::Tensor box_of(const at::Tensor& whole, const plan::Region& region) {
  at::Tensor box = whole.view(region.shape_in(whole.sizes().vec()));
  for (size_t dim = 0; dim < region.start.size(); ++dim)
    box = box.narrow(static_cast<int64_t>(dim), region.start[dim], region.extent[dim]);
  return box;
}

}  // namespace trireme::parallel
