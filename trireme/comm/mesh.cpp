#include "trireme/comm/mesh.h"

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

using plan::Axis;

std::shared_ptr<Group> data_parallel_group(const Mesh& mesh) {
  if (mesh.replicate->size() == 1) return mesh.shard;
  if (mesh.shard->size() == 1) return mesh.replicate;
  return mesh.world->make_group(
      "dp", mesh.shape.group(mesh.world->rank(), {Axis::kDpReplicate, Axis::kDpShard, Axis::kCp}));
}

std::vector<int64_t> all_ranks(int64_t size) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

}  // namespace

Mesh make_mesh(std::shared_ptr<World> world, const plan::MeshShape& shape, GatherBy along_tp) {
  TRIREME_CHECK(shape.world_size() == world->size(),
                "[comm.make_mesh] the mesh {} needs {} ranks, but the world has {}", shape.to_string(),
                shape.world_size(), world->size());
  const int64_t rank = world->rank();
  Mesh mesh;
  mesh.shape = shape;
  mesh.world = std::move(world);
  mesh.all = mesh.world->make_group("all", all_ranks(mesh.world->size()));
  mesh.shard = mesh.world->make_group("dp_shard", shape.group(rank, {Axis::kDpShard, Axis::kCp}));
  mesh.cp = mesh.world->make_group("cp", shape.group(rank, {Axis::kCp}));
  mesh.replicate = mesh.world->make_group("dp_replicate", shape.group(rank, {Axis::kDpReplicate}));
  mesh.dp = data_parallel_group(mesh);
  mesh.pp = mesh.world->make_group("pp", shape.group(rank, {Axis::kPp}));
  PeerOptions of_tp = mesh.world->peer_options();
  if (of_tp.gather == GatherBy::kAuto) of_tp.gather = along_tp;
  of_tp.sum = along_tp;
  mesh.tp = mesh.world->make_group("tp", shape.group(rank, {Axis::kTp}), of_tp);
  mesh.tp_gradients = mesh.tp;
  mesh.stage = mesh.dp;
  if (mesh.tp->size() > 1) {
    mesh.tp_gradients = mesh.world->make_group("tp_gradients", shape.group(rank, {Axis::kTp}));
    mesh.stage = mesh.world->make_group(
        "stage", shape.group(rank, {Axis::kDpReplicate, Axis::kDpShard, Axis::kCp, Axis::kTp}));
  }
  mesh.dp_rank = shape.dp_rank(rank);
  mesh.pp_rank = mesh.pp->rank();
  mesh.tp_rank = mesh.tp->rank();
  mesh.cp_rank = mesh.cp->rank();
  return mesh;
}

}  // namespace trireme::comm
