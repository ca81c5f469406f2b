#include "trireme/cli/run_plan.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/refusal.h"
#include "trireme/base/build_info.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/cli/words.h"
#include "trireme/plan/model_facts.h"

namespace trireme::cli {
namespace {

using plan::Device;

TEST(ChooseRanks, DefaultsToAllGpusElseTwo) {
  EXPECT_EQ(choose_ranks({}, Device::kCuda, 8), 8);
  EXPECT_EQ(choose_ranks({}, Device::kCpu, 8), 2);
  EXPECT_EQ(choose_ranks({}, Device::kCpu, 0), 2);
  EXPECT_EQ(choose_ranks(5, Device::kCpu, 0), 5);
}

TEST(ChooseRanks, RefusesMoreRanksThanGpusAndNamesBothNumbers) {
  EXPECT_EQ(choose_ranks(4, Device::kCuda, 4), 4);
  const std::string message = test::failure_of<ConfigError>([] { choose_ranks(5, Device::kCuda, 4); });
  EXPECT_NE(message.find("-n 5"), std::string::npos) << message;
  EXPECT_NE(message.find("GPUs (4)"), std::string::npos) << message;
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

TEST(PlanRun, SaysWhatIsComputedAgain) {
  const auto planned = [](std::vector<std::string> overrides, Device device) {
    overrides.insert(overrides.end(), {"data.seq_len=4096", "precision.compute=bf16"});
    const plan::Config config =
        plan::load({.path = {}, .text = {}, .overrides = overrides}, Environment()).config;
    const RunPlan run = plan_run(config, device, 2);
    return std::pair(to_text(run, config), nlohmann::json::parse(to_json(run, config))["recompute"]);
  };
  const auto [text, word] = planned({"model.preset=llama-8b"}, Device::kCuda);
  EXPECT_NE(text.find("norms and activations (memory.recompute=auto: about 0.5% of a step)"),
            std::string::npos)
      << text;
  EXPECT_EQ(word, "cheap");
  for (const auto& [setting, device] : {std::pair("none", Device::kCuda), std::pair("auto", Device::kCpu)}) {
    const auto [plain, kept] =
        planned({"model.preset=llama-8b", std::string("memory.recompute=") + setting}, device);
    EXPECT_EQ(plain.find("recomputed"), std::string::npos) << plain;
    EXPECT_EQ(kept, "none");
  }
  const auto [blocks, of_blocks] =
      planned({"model.preset=llama-8b", "memory.recompute=block", "memory.recompute_every=2"}, Device::kCuda);
  EXPECT_NE(blocks.find("whole blocks, in one of every 2 blocks"), std::string::npos) << blocks;
  EXPECT_EQ(of_blocks, "block");
}

TEST(PlanRun, SaysWhatSavesCopy) {
  plan::Config config;
  config.model = plan::complete(config.model, config.data.seq_len);
  EXPECT_EQ(to_text(plan_run(config, Device::kCpu, 2), config, 0).find("checkpoints"), std::string::npos);
  config.checkpoint.every = 7;
  for (const Device device : {Device::kCpu, Device::kCuda}) {
    const RunPlan run = plan_run(config, device, 2);
    const std::string text = to_text(run, config, 0);
    const bool pinned = device == Device::kCuda;
    EXPECT_NE(text.find("every 7 steps: "), std::string::npos) << text;
    EXPECT_EQ(text.find("pinned host memory") != std::string::npos, pinned) << text;
    EXPECT_EQ(text.find("copied for a checkpoint") != std::string::npos, !pinned) << text;
    const auto json = nlohmann::json::parse(to_json(run, config));
    const int64_t copied = json["checkpoint_copy_per_rank"]["bytes"];
    EXPECT_EQ(copied, run.needed.saved_copy);
    EXPECT_EQ(json["checkpoint_copy_per_rank"]["pinned"], pinned);
    EXPECT_EQ(json["checkpoint_copy_per_rank"]["host_bytes"], pinned ? run.needed.pinned_copy : copied);
    EXPECT_EQ(json["peak_bytes_per_rank"]["checkpoint_copy"], pinned ? 0 : copied);
    int64_t sum = 0;
    for (const auto& [key, value] : json["peak_bytes_per_rank"].items())
      sum += key == "total" ? 0 : value.get<int64_t>();
    EXPECT_EQ(json["peak_bytes_per_rank"]["total"], sum);
  }
}

/// The first stage of a network has the largest images, and the last one most of the weights.
TEST(PlanRun, SaysWhatTheRankCopiesThatCopiesMost) {
  const plan::Config config = plan::load({.overrides = {"model.preset=resnet18-cifar", "parallel.pp=2",
                                                        "checkpoint.every=7", "train.global_batch=2048"}},
                                         Environment())
                                  .config;
  const RunPlan run = plan_run(config, Device::kCuda, 2);
  const int64_t first = run.by_pp_rank[0].saved_copy, last = run.by_pp_rank[1].saved_copy;
  ASSERT_GT(last, 2 * first);
  ASSERT_EQ(run.needed.saved_copy, first) << "which needs most memory";
  const auto json = nlohmann::json::parse(to_json(run, config));
  EXPECT_EQ(json["checkpoint_copy_per_rank"]["bytes"], last);
  EXPECT_EQ(json["checkpoint_copy_per_rank"]["host_bytes"], run.by_pp_rank[1].pinned_copy);
  const std::string text = to_text(run, config, 0);
  EXPECT_NE(text.find(bytes_text(last) + " per rank copied to"), std::string::npos) << text;
}

TEST(PlanRun, RefusesFp8ThatCannotBeOrPlansForBf16) {
  plan::Config config;
  config.model = plan::complete(config.model, config.data.seq_len);
  config.precision.compute = plan::Dtype::kBf16;
  const auto peak = [&](Device device) { return plan_run(config, device, 1, {}).needed.peak(); };
  const int64_t bf16 = peak(Device::kCpu), bf16_on_gpu = peak(Device::kCuda);
  plan::Fp8Config& fp8 = config.precision.fp8;
  fp8.recipe = plan::Fp8::kTensorwise;
  EXPECT_LT(peak(Device::kCuda), bf16_on_gpu);
  const std::string message = test::failure_of<ConfigError>([&] { peak(Device::kCpu); });
  EXPECT_NE(message.find("set precision.fp8 to off, or precision.fp8_fallback to bf16"), std::string::npos)
      << message;
  fp8.fallback = plan::Fp8Fallback::kEmulate;
  EXPECT_LT(peak(Device::kCpu), bf16);
  fp8.fallback = plan::Fp8Fallback::kBf16;
  EXPECT_EQ(peak(Device::kCpu), bf16);
  config.model.d_ff += 8;
  EXPECT_EQ(peak(Device::kCuda), [&] {
    fp8.recipe = plan::Fp8::kOff;
    return peak(Device::kCuda);
  }());
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
