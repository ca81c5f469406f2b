#include "trireme/plan/policy.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

TEST(Policy, EveryRowIsFoundByItsLabel) {
  for (const Policy& policy : policies()) EXPECT_EQ(&find_policy(policy.label()), &policy);
  EXPECT_EQ(find_policy("fsdp").sharding, Sharding::kFullShard);
}

TEST(Policy, EveryNameAndShardingHasARow) {
  for (const PolicyName policy : all_values<PolicyName>()) EXPECT_EQ(find_policy(policy).name, policy);
  for (const Sharding sharding : all_values<Sharding>()) {
    const Policy& row = find_policy(PolicyName::kFsdp, sharding);
    EXPECT_EQ(row.sharding, sharding == Sharding::kAuto ? Sharding::kFullShard : sharding);
    EXPECT_EQ(&find_policy(row.label()), &row);
  }
  EXPECT_THROW(find_policy(PolicyName::kDdp, Sharding::kNoShard), LogicError);
}

TEST(Policy, ShardingGrowsFromOptimizerToGradientsToParameters) {
  for (const Policy& policy : policies()) {
    EXPECT_TRUE(policy.shard_optimizer || !policy.shard_gradients) << policy.label();
    EXPECT_TRUE(policy.shard_gradients || !policy.shard_parameters) << policy.label();
    EXPECT_TRUE(policy.shard_parameters || policy.reshard_after_forward == 1) << policy.label();
    EXPECT_TRUE(policy.shard_parameters || !policy.hybrid) << policy.label();
  }
}

ParallelConfig config_of(std::string_view policy, std::string_view sharding = "auto",
                         std::string_view reshard = "auto") {
  ParallelConfig parallel;
  parallel.policy = parse<PolicyName>(policy).value();
  parallel.sharding = parse<Sharding>(sharding).value();
  parallel.reshard_after_forward = parse_reshard(reshard).value();
  return parallel;
}

MeshShape mesh_of(int64_t dp_replicate, int64_t dp_shard) {
  return MeshShape({1, dp_replicate, dp_shard, 1, 1});
}

std::string refusal(const ParallelConfig& parallel, const MeshShape& mesh) {
  try {
    resolve_policy(parallel, mesh);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Policy, ReplicasMakeFsdpHybrid) {
  EXPECT_EQ(resolve_policy(config_of("fsdp"), mesh_of(1, 4)).label(), "fsdp:full_shard");
  EXPECT_EQ(resolve_policy(config_of("fsdp"), mesh_of(2, 2)).label(), "fsdp:hybrid_shard");
  EXPECT_EQ(resolve_policy(config_of("fsdp", "hybrid_shard_zero2"), mesh_of(2, 2)).shard_ranks(mesh_of(2, 2)),
            2);
  EXPECT_EQ(resolve_policy(config_of("zero1"), mesh_of(1, 4)).shard_ranks(mesh_of(1, 4)), 4);
}

TEST(Policy, AfterForwardParametersAreFreedKeptOrSharedByNeighbours) {
  const MeshShape mesh = mesh_of(1, 4);
  const auto reshard = [&](const std::string& asked) {
    return resolve_policy(config_of("fsdp", "auto", asked), mesh).reshard_after_forward;
  };
  EXPECT_EQ(reshard("auto"), Policy::kSameRanks);
  EXPECT_EQ(reshard("true"), Policy::kSameRanks);
  EXPECT_EQ(reshard("false"), 1);
  EXPECT_EQ(reshard("2"), 2);
  EXPECT_EQ(reshard("4"), Policy::kSameRanks) << "four of four ranks are all of them";
  for (const char* wrong : {"3", "8"}) {
    EXPECT_NE(refusal(config_of("fsdp", "auto", wrong), mesh).find("does not divide the 4 ranks"),
              std::string::npos)
        << wrong;
  }
}

TEST(Policy, RowsThatDoNotFitTheMeshAreRefused) {
  EXPECT_NE(refusal(config_of("fsdp", "hybrid_shard"), mesh_of(1, 4)).find("dp_replicate=1"),
            std::string::npos);
  EXPECT_NE(refusal(config_of("zero1"), mesh_of(2, 2)).find("sharding=hybrid_shard"), std::string::npos);
  EXPECT_NE(refusal(config_of("fsdp", "full_shard"), mesh_of(2, 2)).find("all data-parallel"),
            std::string::npos);
  EXPECT_NE(refusal(config_of("ddp", "full_shard"), mesh_of(1, 2)).find("is for parallel.policy=fsdp"),
            std::string::npos);
  EXPECT_NE(refusal(config_of("zero1", "auto", "true"), mesh_of(1, 2)).find("has no effect"),
            std::string::npos);
}

TEST(Policy, ZeroStagesAreThoseOfThePaper) {
  // Rajbhandari et al. 2020, section 5: stage 1 optimizer state, stage 2 plus gradients, stage 3 plus
  // parameters.
  const auto sharded = [](const Policy& p) {
    return p.shard_optimizer + p.shard_gradients + p.shard_parameters;
  };
  EXPECT_EQ(sharded(find_policy("ddp")), 0);
  EXPECT_EQ(sharded(find_policy("zero1")), 1);
  EXPECT_EQ(sharded(find_policy("zero2")), 2);
  EXPECT_EQ(sharded(find_policy("zero3")), 3);
  EXPECT_EQ(sharded(find_policy("fsdp")), 3);
}

TEST(Policy, UnknownNameSuggestsTheNearest) {
  try {
    find_policy("zero4");
    FAIL() << "accepted zero4";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'zero"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme::plan
