#pragma once
// The matrices of which the hook powersgd sends factors (Vogels et al. 2019, PowerSGD).
#include <cstdint>
#include <vector>

#include "trireme/plan/flat_layout.h"

namespace trireme::plan {

/// A parameter as a matrix, row by row from `offset` on in the flat layout, and the columns of its factors.
struct FactoredMatrix {
  int64_t offset = 0, rows = 0, columns = 0, rank = 0;
};

/// The matrices of a unit that factors of at most `rank` columns make smaller, for gradients of
/// `element_bytes` an element. A sum that every rank receives costs twice the bytes of one that is scattered,
/// so a unit whose matrices would save less than that has none, and is reduced plainly.
std::vector<FactoredMatrix> factored_matrices(const FlatLayout& layout, int64_t rank, int64_t element_bytes);

}  // namespace trireme::plan
