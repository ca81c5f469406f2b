#include "trireme/plan/policy.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

TEST(Policy, EveryRowIsFoundByItsName) {
  for (const Policy& policy : policies()) EXPECT_EQ(&find_policy(policy.name), &policy);
}

TEST(Policy, ShardingGrowsFromOptimizerToGradientsToParameters) {
  for (const Policy& policy : policies()) {
    EXPECT_TRUE(policy.shard_optimizer || !policy.shard_gradients) << policy.name;
    EXPECT_TRUE(policy.shard_gradients || !policy.shard_parameters) << policy.name;
    EXPECT_TRUE(policy.shard_parameters || !policy.reshard_after_forward) << policy.name;
  }
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
