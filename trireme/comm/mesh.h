#pragma once
// The groups of a rank, one for each axis along which a model is spread.
#include <cstdint>
#include <memory>

#include "trireme/comm/world.h"
#include "trireme/plan/mesh_shape.h"

namespace trireme::comm {

/// One group per axis of the mesh, plus the groups that several axes form. The ranks of a pipeline stage are
/// neighbours: pp is the slowest axis, and all groups but `all` and `pp` lie within a stage.
struct Mesh {
  plan::MeshShape shape;
  std::shared_ptr<World> world;
  std::shared_ptr<Group> all;        ///< every rank
  std::shared_ptr<Group> shard;      ///< along dp_shard: parameters are split over it
  std::shared_ptr<Group> replicate;  ///< along dp_replicate
  /// Both data-parallel axes; the same object as `shard` or `replicate` when the other axis has size 1.
  std::shared_ptr<Group> dp;
  std::shared_ptr<Group> pp;  ///< along pp: one rank of each stage; its group ranks are pp_rank
  int64_t dp_rank = 0;        ///< within the stage
  int64_t pp_rank = 0;
};

/// Collective over the world. Throws LogicError when the shape does not have the world's size.
Mesh make_mesh(std::shared_ptr<World> world, const plan::MeshShape& shape);

}  // namespace trireme::comm
