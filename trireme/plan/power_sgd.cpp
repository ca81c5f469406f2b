#include "trireme/plan/power_sgd.h"

#include <algorithm>

#include "trireme/plan/config.h"

namespace trireme::plan {

std::vector<FactoredMatrix> factored_matrices(const FlatLayout& layout, int64_t rank, int64_t element_bytes) {
  const auto saves = [element_bytes](int64_t travels, int64_t numel) {
    return 2 * travels * kFp32Bytes < numel * element_bytes;
  };
  std::vector<FactoredMatrix> matrices;
  int64_t travels = layout.numel();
  for (const FlatEntry& entry : layout.entries()) {
    if (entry.shape.size() < 2 || entry.numel == 0) continue;
    const int64_t rows = entry.shape.front(), columns = entry.numel / rows,
                  kept = std::min({rank, rows, columns}), factors = (rows + columns) * kept;
    if (!saves(factors, entry.numel)) continue;
    travels += factors - entry.numel;
    matrices.push_back({entry.offset, rows, columns, kept});
  }
  if (!saves(travels, layout.numel())) matrices.clear();
  return matrices;
}

}  // namespace trireme::plan
