#include "trireme/cli/run_plan.h"

#include <gtest/gtest.h>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

using plan::Device;

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
  EXPECT_EQ(choose_ranks({}, Device::kCuda, 8), 8);
  EXPECT_EQ(choose_ranks({}, Device::kCpu, 8), 2);
  EXPECT_EQ(choose_ranks({}, Device::kCpu, 0), 2);
  EXPECT_EQ(choose_ranks(5, Device::kCpu, 0), 5);
}

TEST(ChooseRanks, RefusesMoreRanksThanGpusAndNamesBothNumbers) {
  EXPECT_EQ(choose_ranks(4, Device::kCuda, 4), 4);
  const std::string message = message_of<ConfigError>([] { choose_ranks(5, Device::kCuda, 4); });
  EXPECT_NE(message.find("-n 5"), std::string::npos) << message;
  EXPECT_NE(message.find("GPUs: 4"), std::string::npos) << message;
  EXPECT_NE(message.find("use -n 4"), std::string::npos) << message;
}

TEST(ChooseRanks, RefusesLessThanOne) {
  for (const int64_t ranks : {0, -3}) EXPECT_THROW(choose_ranks(ranks, Device::kCpu, 0), ConfigError);
}

TEST(ChooseDevice, AutoIsCudaWhenBuildAndMachineHaveIt) {
  EXPECT_EQ(choose_device(Device::kAuto, 0), Device::kCpu);
  EXPECT_EQ(choose_device(Device::kAuto, 2), kHasCuda ? Device::kCuda : Device::kCpu);
  EXPECT_EQ(choose_device(Device::kCpu, 2), Device::kCpu);
}

TEST(ChooseDevice, NeverFallsBackFromCudaInSilence) {
  EXPECT_THROW(choose_device(Device::kCuda, 0), EnvironmentError);
  if (!kHasCuda) {
    EXPECT_THROW(choose_device(Device::kCuda, 2), EnvironmentError);
  }
}

TEST(PlanRun, AgreesWithTheBatchEquation) {
  plan::Config config;
  config.train.global_batch = 24;
  config.train.micro_batch = 3;
  const RunPlan run = plan_run(config, Device::kCpu, 4);
  EXPECT_EQ(run.batch.accumulation, 2);  // 24 = 3 * 2 * 4
  EXPECT_EQ(run.mesh.dp_size(), 4);
  EXPECT_EQ(run.ranks, 4);
  config.train.global_batch = 25;
  EXPECT_THROW(plan_run(config, Device::kCpu, 4), ConfigError);
}

}  // namespace
}  // namespace trireme::cli
