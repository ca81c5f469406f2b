// Uses the planner from an installed Trireme, without torch.
#include <fmt/format.h>

#include "trireme/base/build_info.h"
#include "trireme/plan/batch.h"
#include "trireme/plan/mesh_shape.h"

int main() {
  trireme::plan::ParallelConfig parallel;
  parallel.tp = 2;
  const auto mesh = trireme::plan::MeshShape::fit(parallel, 8);
  const auto batch = trireme::plan::plan_batch(64, 4, mesh.dp_size());
  fmt::print("trireme {}: {} ranks, {} data-parallel, accumulation {}\n", trireme::kVersion,
             mesh.world_size(), mesh.dp_size(), batch.accumulation);
  // 8 ranks / tp 2 = 4 data-parallel; 64 = 4 x accumulation x 4.
  return mesh.dp_size() == 4 && batch.accumulation == 4 ? 0 : 1;
}
