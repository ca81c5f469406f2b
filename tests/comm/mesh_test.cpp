// Groups along the axes of a mesh have the ranks that mesh arithmetic says, and carry their own traffic.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/comm/mesh.h"

namespace trireme {
namespace {

using comm::ReduceOp;
using comm::World;
using plan::MeshShape;
using test::run_ranks;
using Ranks = std::vector<int64_t>;

MeshShape shape(int64_t replicate, int64_t shard) {
  return MeshShape({1, replicate, shard, 1, 1});
}

TEST(Mesh, HybridAxesFormRowsAndColumns) {
  run_ranks(4, [](std::shared_ptr<World> world) {
    const int64_t rank = world->rank();
    const comm::Mesh mesh = make_mesh(world, shape(2, 2));
    EXPECT_EQ(mesh.all->ranks(), (Ranks{0, 1, 2, 3}));
    EXPECT_EQ(mesh.dp->ranks(), (Ranks{0, 1, 2, 3}));
    EXPECT_EQ(mesh.shard->ranks(), rank < 2 ? (Ranks{0, 1}) : (Ranks{2, 3}));
    EXPECT_EQ(mesh.replicate->ranks(), rank % 2 == 0 ? (Ranks{0, 2}) : (Ranks{1, 3}));
    EXPECT_EQ(mesh.shard->rank(), rank % 2);
    EXPECT_EQ(mesh.replicate->rank(), rank / 2);
    EXPECT_EQ(mesh.dp_rank, rank);

    at::Tensor row = at::full({1}, static_cast<double>(rank)), column = row.clone();
    mesh.shard->all_reduce(row, ReduceOp::kSum);
    mesh.replicate->all_reduce(column, ReduceOp::kSum);
    EXPECT_EQ(row.item<double>(), rank < 2 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(column.item<double>(), rank % 2 == 0 ? 0 + 2 : 1 + 3);
    EXPECT_EQ(mesh.dp->traffic().size(), 0u);
  });
}

TEST(Mesh, OneAxisAloneIsTheDataParallelGroup) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh sharded = make_mesh(world, shape(1, 2));
    EXPECT_EQ(sharded.dp, sharded.shard);
    EXPECT_EQ(sharded.replicate->size(), 1);
    const comm::Mesh replicated = make_mesh(world, shape(2, 1));  // a second mesh over the same world
    EXPECT_EQ(replicated.dp, replicated.replicate);
    EXPECT_EQ(replicated.shard->size(), 1);
  });
}

TEST(Mesh, OfOneRankNeedsNoStore) {
  const auto world = World::join_store({}, 0, 1, c10::kCPU, 1.0);
  const comm::Mesh mesh = make_mesh(world, shape(1, 1));
  at::Tensor tensor = at::ones({3}), copy = at::zeros({3});
  mesh.dp->all_reduce(tensor, ReduceOp::kSum);
  mesh.all->all_gather(copy, tensor);
  mesh.all->barrier();
  EXPECT_TRUE(at::equal(copy, at::ones({3})));
  EXPECT_EQ(world->share_from_root("key", "text"), "text");
}

TEST(Mesh, RefusesAShapeOfAnotherSize) {
  const auto world = World::join_store({}, 0, 1, c10::kCPU, 1.0);
  EXPECT_THROW(make_mesh(world, shape(2, 2)), LogicError);
}

}  // namespace
}  // namespace trireme
