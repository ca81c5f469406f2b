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

MeshShape shape(int64_t replicate, int64_t shard, int64_t pp = 1) {
  return MeshShape({pp, replicate, shard, 1, 1});
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
    EXPECT_EQ(mesh.pp->ranks(), (Ranks{rank}));
    EXPECT_EQ(mesh.pp_rank, 0);

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

TEST(Mesh, PipelineStagesAreNeighboursWithDataParallelGroupsOfTheirOwn) {
  for (const int64_t stages : {2, 4}) {
    for (const bool sharded : {true, false}) {
      run_ranks(2 * stages, [&](std::shared_ptr<World> world) {
        const int64_t rank = world->rank(), stage = rank / 2;
        const comm::Mesh mesh = make_mesh(world, sharded ? shape(1, 2, stages) : shape(2, 1, stages));
        EXPECT_EQ(mesh.pp_rank, stage);
        EXPECT_EQ(mesh.dp_rank, rank % 2);
        EXPECT_EQ(mesh.dp->ranks(), (Ranks{2 * stage, 2 * stage + 1}));
        EXPECT_EQ(mesh.dp, sharded ? mesh.shard : mesh.replicate);
        EXPECT_EQ((sharded ? mesh.replicate : mesh.shard)->size(), 1);
        EXPECT_EQ(mesh.pp->size(), stages);
        EXPECT_EQ(mesh.pp->rank(), stage);
        for (int64_t s = 0; s < stages; ++s)
          EXPECT_EQ(mesh.pp->ranks()[static_cast<size_t>(s)], 2 * s + rank % 2);

        at::Tensor within = at::full({1}, static_cast<double>(rank)), across = within.clone();
        mesh.dp->all_reduce(within, ReduceOp::kSum);
        mesh.pp->all_reduce(across, ReduceOp::kSum);
        EXPECT_EQ(within.item<int64_t>(), 4 * stage + 1);
        EXPECT_EQ(across.item<int64_t>(), stages * (stages - 1) + stages * (rank % 2));
      });
    }
  }
}

TEST(Mesh, BothDataParallelAxesLieWithinAStage) {
  run_ranks(8, [](std::shared_ptr<World> world) {
    const int64_t rank = world->rank(), first = rank / 4 * 4;
    const comm::Mesh mesh = make_mesh(world, shape(2, 2, 2));
    EXPECT_EQ(mesh.dp->ranks(), (Ranks{first, first + 1, first + 2, first + 3}));
    EXPECT_EQ(mesh.dp_rank, rank - first);
    EXPECT_EQ(mesh.pp->ranks(), (Ranks{rank % 4, rank % 4 + 4}));
    at::Tensor sum = at::full({1}, static_cast<double>(rank));
    mesh.dp->all_reduce(sum, ReduceOp::kSum);
    EXPECT_EQ(sum.item<int64_t>(), 4 * first + 6);
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
