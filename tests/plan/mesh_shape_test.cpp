#include "trireme/plan/mesh_shape.h"

#include <gtest/gtest.h>

#include <set>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

constexpr Axis kAxisValues[] = {Axis::kPp, Axis::kDpReplicate, Axis::kDpShard, Axis::kCp, Axis::kTp};

/// Every mesh with axes of 1 to 3.
template <typename Law>
void for_meshes(Law law) {
  for (int64_t code = 0; code < 243; ++code) {
    MeshShape::Coordinates sizes{};
    int64_t rest = code;
    for (int64_t& size : sizes) {
      size = 1 + rest % 3;
      rest /= 3;
    }
    law(MeshShape(sizes));
  }
}

std::string refusal(const ParallelConfig& parallel, int64_t world_size) {
  try {
    MeshShape::fit(parallel, world_size);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(MeshShape, RankAndCoordinatesAreInverse) {
  for_meshes([](const MeshShape& mesh) {
    std::set<MeshShape::Coordinates> seen;
    for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
      const MeshShape::Coordinates at = mesh.coordinates(rank);
      EXPECT_EQ(mesh.rank(at), rank);
      seen.insert(at);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), mesh.world_size());
  });
}

TEST(MeshShape, LaterAxesRunFaster) {
  const MeshShape mesh({2, 3, 4, 5, 6});
  EXPECT_EQ(mesh.world_size(), 720);
  EXPECT_EQ(mesh.rank({1, 0, 0, 0, 0}), 3 * 4 * 5 * 6);
  EXPECT_EQ(mesh.rank({0, 1, 0, 0, 0}), 4 * 5 * 6);
  EXPECT_EQ(mesh.rank({0, 0, 1, 0, 0}), 5 * 6);
  EXPECT_EQ(mesh.rank({0, 0, 0, 1, 0}), 6);
  EXPECT_EQ(mesh.rank({0, 0, 0, 0, 1}), 1);
  EXPECT_EQ(mesh.rank({1, 2, 3, 4, 5}), 719);
}

TEST(MeshShape, GroupsAlongAnAxisPartitionTheWorld) {
  for_meshes([](const MeshShape& mesh) {
    for (const Axis axis : kAxisValues) {
      for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
        const std::vector<int64_t> members = mesh.group(rank, {axis});
        ASSERT_EQ(static_cast<int64_t>(members.size()), mesh.size(axis));
        for (const int64_t member : members) ASSERT_EQ(mesh.group(member, {axis}), members);
        const auto index = static_cast<size_t>(mesh.coordinates(rank)[static_cast<size_t>(axis)]);
        ASSERT_EQ(members[index], rank);
      }
    }
  });
}

TEST(MeshShape, GroupOverAllAxesIsTheWorldAndOverNoneIsTheRank) {
  const MeshShape mesh({2, 1, 3, 1, 2});
  const std::vector<int64_t> world = mesh.group(5, {std::begin(kAxisValues), std::end(kAxisValues)});
  ASSERT_EQ(world.size(), 12u);
  for (int64_t rank = 0; rank < 12; ++rank) EXPECT_EQ(world[static_cast<size_t>(rank)], rank);
  EXPECT_EQ(mesh.group(5, {}), std::vector<int64_t>{5});
}

TEST(MeshShape, DpRankIsTheIndexInTheDataParallelGroup) {
  for_meshes([](const MeshShape& mesh) {
    for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
      const std::vector<int64_t> members = mesh.group(rank, {Axis::kDpReplicate, Axis::kDpShard});
      ASSERT_EQ(static_cast<int64_t>(members.size()), mesh.dp_size());
      ASSERT_EQ(members[static_cast<size_t>(mesh.dp_rank(rank))], rank);
    }
  });
}

TEST(MeshShape, FitGivesTheRestToDpShard) {
  for (int64_t world = 1; world <= 64; ++world) {
    for (const int64_t tp : {1, 2, 4}) {
      ParallelConfig parallel;
      parallel.tp = tp;
      ASSERT_EQ(refusal(parallel, world).empty(), world % tp == 0);
      if (world % tp != 0) continue;
      const MeshShape mesh = MeshShape::fit(parallel, world);
      EXPECT_EQ(mesh.size(Axis::kDpShard), world / tp);
      EXPECT_EQ(mesh.world_size(), world);
    }
  }
}

TEST(MeshShape, AStageIsARangeOfRanksWithDataParallelGroupsOfItsOwn) {
  for (const int64_t stages : {2, 4}) {
    for (const int64_t replicas : {1, 2}) {
      constexpr int64_t kPerStage = 4;
      ParallelConfig parallel;
      parallel.pp = stages;
      parallel.dp_replicate = replicas;
      const MeshShape mesh = MeshShape::fit(parallel, stages * kPerStage);
      EXPECT_EQ(mesh.dp_size(), kPerStage);
      for (int64_t rank = 0; rank < mesh.world_size(); ++rank) {
        const int64_t stage = rank / kPerStage;
        EXPECT_EQ(mesh.coordinates(rank)[static_cast<size_t>(Axis::kPp)], stage);
        EXPECT_EQ(mesh.dp_rank(rank), rank % kPerStage);
        std::vector<int64_t> beside, through;
        for (int64_t r = 0; r < kPerStage; ++r) beside.push_back(stage * kPerStage + r);
        for (int64_t s = 0; s < stages; ++s) through.push_back(s * kPerStage + rank % kPerStage);
        EXPECT_EQ(mesh.group(rank, {Axis::kDpReplicate, Axis::kDpShard}), beside);
        EXPECT_EQ(mesh.group(rank, {Axis::kPp}), through);
      }
    }
  }
}

TEST(MeshShape, FitRefusesAProductThatIsNotTheWorldAndPrintsIt) {
  ParallelConfig parallel;
  parallel.dp_replicate = 2;
  parallel.dp_shard = 3;
  const std::string message = refusal(parallel, 8);
  EXPECT_NE(message.find("pp=1 x dp_replicate=2 x dp_shard=3 x cp=1 x tp=1 = 6 ranks"), std::string::npos)
      << message;
  EXPECT_NE(message.find("the world has 8"), std::string::npos) << message;
}

TEST(MeshShape, FitRefusesAxesBelowOne) {
  ParallelConfig parallel;
  parallel.tp = 0;
  EXPECT_NE(refusal(parallel, 8).find("parallel.tp=0"), std::string::npos) << refusal(parallel, 8);
  parallel.tp = 1;
  parallel.dp_shard = -1;
  EXPECT_NE(refusal(parallel, 8).find("parallel.dp_shard=-1"), std::string::npos);
}

TEST(MeshShape, TextShowsAxesAboveOne) {
  EXPECT_EQ(MeshShape({1, 1, 4, 1, 2}).to_string(), "dp_shard=4 tp=2");
  EXPECT_EQ(MeshShape({2, 1, 4, 1, 1}).to_string(), "pp=2 dp_shard=4");
  EXPECT_EQ(MeshShape().to_string(), "1 rank");
}

TEST(MeshShape, RefusesRanksOutsideTheMesh) {
  const MeshShape mesh({1, 1, 4, 1, 1});
  EXPECT_THROW(mesh.coordinates(4), LogicError);
  EXPECT_THROW(mesh.coordinates(-1), LogicError);
  EXPECT_THROW(mesh.rank({0, 0, 4, 0, 0}), LogicError);
}

}  // namespace
}  // namespace trireme::plan
