#include "trireme/plan/batch.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

std::string refusal(int64_t global_batch, int64_t micro_batch, int64_t dp_size) {
  try {
    plan_batch(global_batch, micro_batch, dp_size);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(BatchPlan, SolvesTheEquationWheneverItCanBeSolved) {
  for (int64_t global_batch = 1; global_batch <= 48; ++global_batch) {
    for (int64_t micro_batch = 1; micro_batch <= 12; ++micro_batch) {
      for (int64_t dp_size = 1; dp_size <= 9; ++dp_size) {
        const bool solvable = global_batch % (micro_batch * dp_size) == 0;
        ASSERT_EQ(refusal(global_batch, micro_batch, dp_size).empty(), solvable);
        if (!solvable) continue;
        const BatchPlan plan = plan_batch(global_batch, micro_batch, dp_size);
        EXPECT_EQ(plan.micro_batch * plan.accumulation * plan.dp_size, global_batch);
        EXPECT_EQ(plan.global_batch, global_batch);
        EXPECT_EQ(plan.micro_batch, micro_batch);
        EXPECT_EQ(plan.dp_size, dp_size);
      }
    }
  }
}

TEST(BatchPlan, ZeroMicroBatchIsOnePass) {
  const BatchPlan plan = plan_batch(24, 0, 4);
  EXPECT_EQ(plan.micro_batch, 6);
  EXPECT_EQ(plan.accumulation, 1);
}

TEST(BatchPlan, RefusesGlobalBatchThatDoesNotDivide) {
  const std::string message = refusal(10, 4, 2);
  EXPECT_NE(message.find("global_batch 10 cannot be split into micro_batch 4 x accumulation x 2 ranks"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("train.global_batch to 8 or 16"), std::string::npos) << message;
  EXPECT_NE(message.find("train.micro_batch to 1 or 5"), std::string::npos)
      << message;  // 10 / 2 = 5 sequences a rank
}

TEST(BatchPlan, RefusesRanksThatDoNotDivideTheGlobalBatch) {
  const std::string message = refusal(10, 0, 4);
  EXPECT_NE(message.find("global_batch 10 cannot be split into equal shares of 4 ranks"), std::string::npos)
      << message;
  EXPECT_NE(message.find("train.global_batch to 8 or 12"), std::string::npos) << message;
  EXPECT_EQ(message.find("train.micro_batch to"), std::string::npos) << message;  // no micro-batch would help
}

TEST(BatchPlan, SuggestsOnlySettingsThatWork) {
  EXPECT_NE(refusal(2, 4, 1).find("train.global_batch to 4, or train.micro_batch to 2"), std::string::npos)
      << refusal(2, 4, 1);
  EXPECT_NE(refusal(3, 0, 8).find("train.global_batch to 8"), std::string::npos) << refusal(3, 0, 8);
}

TEST(BatchPlan, NamesTheKeyThatRules) {
  Config config;
  config.train.rank_batch = 8;
  config.train.micro_batch = 3;
  const auto refused = [&](int64_t ranks, const std::vector<std::string>& words) {
    test::expect_refusal([&] { plan_batch(config, MeshShape::fit(config.parallel, ranks)); }, words);
  };
  refused(2, {"train.rank_batch=8", "train.micro_batch=3", "train.rank_batch to 6 or 9",
              "train.micro_batch to 2 or 4"});
  config.parallel.pp = 2;
  config.train.micro_batch = 0;
  config.pipeline.micro_batches = 3;
  refused(4, {"(train.rank_batch=8)", "train.rank_batch to 6 or 9"});
  config.train.micro_batch = 4;
  refused(4, {"train.micro_batch to 0 or train.rank_batch to 12"});
}

TEST(BatchPlan, RefusesSettingsBelowTheirRange) {
  EXPECT_NE(refusal(0, 1, 1), "");
  EXPECT_NE(refusal(8, -1, 1), "");
  EXPECT_THROW(plan_batch(8, 1, 0), LogicError);
}

}  // namespace
}  // namespace trireme::plan
