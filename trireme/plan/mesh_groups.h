#pragma once
// Who communicates with whom in a mesh, and what for.
#include <cstdint>
#include <string_view>
#include <vector>

#include "trireme/plan/mesh_shape.h"

namespace trireme::plan {

/// The groups of one kind: each rank of the mesh is in exactly one of them.
struct MeshGroups {
  std::string_view name;  ///< as comm::Mesh calls it
  std::string_view purpose;
  std::vector<Axis> axes;                   ///< along which the ranks of a group differ
  std::vector<std::vector<int64_t>> ranks;  ///< of each group, in rising order of its first rank
};

/// All kinds that have more than one rank a group, the busiest ranks first: tp, cp, shard, replicate, dp
/// where that is neither shard nor replicate, and pp.
std::vector<MeshGroups> mesh_groups(const MeshShape& mesh);

}  // namespace trireme::plan
