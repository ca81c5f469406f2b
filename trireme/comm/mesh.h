#pragma once
// The groups of a rank, one for each axis along which a model is spread.
#include <cstdint>
#include <memory>

#include "trireme/comm/world.h"
#include "trireme/plan/mesh_shape.h"

namespace trireme::comm {

/// One group per axis of the mesh, plus the groups that several axes form. The ranks of a pipeline stage are
/// neighbours: pp is the slowest axis, and all groups but `all` and `pp` lie within a stage. Those of `tp`
/// are neighbours in it. `dp_rank` counts data: ranks of one `cp` or `tp` group have the same.
struct Mesh {
  plan::MeshShape shape;
  std::shared_ptr<World> world;
  std::shared_ptr<Group> all;        ///< every rank
  std::shared_ptr<Group> shard;      ///< along dp_shard and cp: parameters are split over it
  std::shared_ptr<Group> replicate;  ///< along dp_replicate
  /// All of these, whose gradients are added up; the same object as `shard` or `replicate` when the other has
  /// size 1.
  std::shared_ptr<Group> dp;
  std::shared_ptr<Group> cp;  ///< along cp: ranks have tokens of the same sequences
  std::shared_ptr<Group> pp;  ///< along pp: one rank of each stage; its group ranks are pp_rank
  std::shared_ptr<Group> tp;  ///< along tp: parameters are parts of larger ones, and tokens are split
  /// The same ranks as `tp`, for gradients: they are added up beside passes, on another stream of a GPU.
  std::shared_ptr<Group> tp_gradients;
  std::shared_ptr<Group> stage;  ///< the ranks of `dp` and `tp` together; the same object as `dp` without tp
  int64_t dp_rank = 0;           ///< within the stage
  int64_t pp_rank = 0;
  int64_t tp_rank = 0;
  int64_t cp_rank = 0;
};

/// `along_tp`: who moves what GPUs along tp gather and sum, unless the world's options say so. Copy engines
/// leave the multiprocessors to products that run beside. Collective over the world. Throws LogicError when
/// the shape does not have the world's size.
Mesh make_mesh(std::shared_ptr<World> world, const plan::MeshShape& shape,
               GatherBy along_tp = GatherBy::kAuto);

}  // namespace trireme::comm
