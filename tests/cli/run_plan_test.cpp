#include "trireme/cli/run_plan.h"

#include <gtest/gtest.h>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/plan/policy.h"

namespace trireme::cli {
namespace {

template <typename Expected, typename Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  return "";
}

TEST(ChooseRanks, DefaultsToAllGpusElseTwo) {
  EXPECT_EQ(choose_ranks({}, "cuda", 8), 8);
  EXPECT_EQ(choose_ranks({}, "cpu", 8), 2);
  EXPECT_EQ(choose_ranks({}, "cpu", 0), 2);
  EXPECT_EQ(choose_ranks(5, "cpu", 0), 5);
}

TEST(ChooseRanks, RefusesMoreRanksThanGpusAndNamesBothNumbers) {
  EXPECT_EQ(choose_ranks(4, "cuda", 4), 4);
  const std::string message = message_of<ConfigError>([] { choose_ranks(5, "cuda", 4); });
  EXPECT_NE(message.find("-n 5"), std::string::npos) << message;
  EXPECT_NE(message.find("GPUs: 4"), std::string::npos) << message;
  EXPECT_NE(message.find("use -n 4"), std::string::npos) << message;
}

TEST(ChooseRanks, RefusesLessThanOne) {
  for (const int64_t ranks : {0, -3}) EXPECT_THROW(choose_ranks(ranks, "cpu", 0), ConfigError);
}

TEST(ChooseDevice, AutoIsCudaWhenBuildAndMachineHaveIt) {
  EXPECT_EQ(choose_device("auto", 0), "cpu");
  EXPECT_EQ(choose_device("auto", 2), kHasCuda ? "cuda" : "cpu");
  EXPECT_EQ(choose_device("cpu", 2), "cpu");
}

TEST(ChooseDevice, NeverFallsBackFromCudaInSilence) {
  EXPECT_THROW(choose_device("cuda", 0), EnvironmentError);
  if (!kHasCuda) {
    EXPECT_THROW(choose_device("cuda", 2), EnvironmentError);
  }
}

plan::Config config_of(const std::string& policy, const std::string& compute) {
  plan::Config config;
  config.parallel.policy = policy;
  config.precision.compute = compute;
  return config;
}

// The ZeRO paper's table (arXiv:1910.02054, figure 1) with K = 12: 7.5B parameters in bf16 over 64 ranks take
// 120, 31.4, 16.6 and 1.9 GB with the baseline, stages 1, 2 and 3.
TEST(StateBytes, MatchesTheTableOfTheZeroPaper) {
  const int64_t params = 7'500'000'000;
  const plan::MeshShape mesh({1, 1, 64, 1, 1});
  const std::pair<const char*, double> rows[] = {
      {"ddp", 120.0}, {"zero1", 31.4}, {"zero2", 16.6}, {"zero3", 1.9}};
  for (const auto& [policy, gigabytes] : rows) {
    const StateBytes state = state_bytes(config_of(policy, "bf16"), params, mesh);
    EXPECT_NEAR(static_cast<double>(state.total()) / 1e9, gigabytes, 0.06) << policy;
  }
}

TEST(StateBytes, OneRankHoldsAllWhateverThePolicy) {
  const plan::MeshShape one({1, 1, 1, 1, 1});
  for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}) {
    EXPECT_EQ(state_bytes(config_of(policy, "fp32"), 1000, one).total(), 1000 * (4 + 4 + 12));
    EXPECT_EQ(state_bytes(config_of(policy, "bf16"), 1000, one).total(), 1000 * (2 + 2 + 12));
  }
}

TEST(StateBytes, ShardsCoverEverythingAndReplicasDoNotShard) {
  const plan::Config config = config_of("fsdp", "fp32");
  for (int64_t shards = 1; shards <= 9; ++shards) {
    for (const int64_t params : {1, 7, 1000, 999983}) {
      const StateBytes state = state_bytes(config, params, plan::MeshShape({1, 1, shards, 1, 1}));
      EXPECT_GE(state.total() * shards, params * 20);
      EXPECT_LT(state.total() * shards, params * 20 + 20 * shards);
      EXPECT_EQ(state.total(), state_bytes(config, params, plan::MeshShape({1, 3, shards, 1, 1})).total());
    }
  }
}

TEST(PlanRun, AgreesWithTheBatchEquation) {
  plan::Config config;
  config.train.global_batch = 24;
  config.train.micro_batch = 3;
  const RunPlan run = plan_run(config, "cpu", 4);
  EXPECT_EQ(run.batch.accumulation, 2);  // 24 = 3 * 2 * 4
  EXPECT_EQ(run.mesh.dp_size(), 4);
  EXPECT_EQ(run.ranks, 4);
  config.train.global_batch = 25;
  EXPECT_THROW(plan_run(config, "cpu", 4), ConfigError);
}

}  // namespace
}  // namespace trireme::cli
