#include "trireme/plan/mesh_groups.h"

#include <utility>

namespace trireme::plan {
namespace {

int64_t ranks_along(const MeshShape& mesh, const std::vector<Axis>& axes) {
  int64_t ranks = 1;
  for (const Axis axis : axes) ranks *= mesh.size(axis);
  return ranks;
}

/// A group begins with the rank that is first along all of its axes.
bool begins_group(const MeshShape& mesh, int64_t rank, const std::vector<Axis>& axes) {
  const MeshShape::Coordinates at = mesh.coordinates(rank);
  for (const Axis axis : axes) {
    if (at[static_cast<size_t>(axis)] != 0) return false;
  }
  return true;
}

}  // namespace

std::vector<MeshGroups> mesh_groups(const MeshShape& mesh) {
  std::vector<MeshGroups> kinds = {
      {"tp", "parts of the same layers: activations, and gradients of copies", {Axis::kTp}, {}},
      {"cp", "tokens of the same sequences: what attention takes and gives", {Axis::kCp}, {}},
      {"shard", "parameters, gradients and optimizer state are sharded", {Axis::kDpShard, Axis::kCp}, {}},
      {"replicate", "shards of gradients are added up", {Axis::kDpReplicate}, {}},
      {"dp", "gradients are added up", {Axis::kDpReplicate, Axis::kDpShard, Axis::kCp}, {}},
      {"pp", "stages send each other activations and their gradients", {Axis::kPp}, {}}};
  std::vector<MeshGroups> found;
  for (MeshGroups& kind : kinds) {
    if (ranks_along(mesh, kind.axes) == 1) continue;
    const bool is_part = kind.name == "dp" && (ranks_along(mesh, {Axis::kDpReplicate}) == 1 ||
                                               ranks_along(mesh, {Axis::kDpShard, Axis::kCp}) == 1);
    if (is_part) continue;
    for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
      if (begins_group(mesh, rank, kind.axes)) kind.ranks.push_back(mesh.group(rank, kind.axes));
    }
    found.push_back(std::move(kind));
  }
  return found;
}

}  // namespace trireme::plan
