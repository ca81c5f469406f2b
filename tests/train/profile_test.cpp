// Sums over a trace: the kinds of kernels and operators, and where a step's time goes on a CPU.
#include "trireme/train/profile.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/train/trainer_fixture.h"
#include "trireme/plan/unit_work.h"

namespace trireme::train {
namespace {

TEST(Profile, KindsOfCountedWorkAreKindsOfKernels) {
  const std::pair<plan::KernelKind, const char*> kernels[] = {
      {plan::KernelKind::kGemm, "nvjet_sm90_tst_128x256"},
      {plan::KernelKind::kAttention, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"},
      {plan::KernelKind::kNorm, "rms_norm_forward_kernel"},
      {plan::KernelKind::kRope, "rotate_heads"},
      {plan::KernelKind::kActivation, "map_rows"},
      {plan::KernelKind::kLoss, "cross_entropy_kernel"},
      {plan::KernelKind::kOptimizer, "update_parts"}};
  for (const auto& [kind, kernel] : kernels) EXPECT_EQ(kernel_group(kernel), plan::name(kind)) << kernel;
  const std::pair<plan::KernelKind, const char*> operators[] = {
      {plan::KernelKind::kGemm, "trireme::matmul"},
      {plan::KernelKind::kAttention, "trireme::attention_backward"},
      {plan::KernelKind::kNorm, "trireme::layer_norm_forward"},
      {plan::KernelKind::kRope, "trireme::rope_inplace"},
      {plan::KernelKind::kActivation, "trireme::swiglu_backward"},
      {plan::KernelKind::kLoss, "trireme::cross_entropy"},
      {plan::KernelKind::kOptimizer, "update"}};
  for (const auto& [kind, name] : operators) EXPECT_EQ(operator_group(name), plan::name(kind)) << name;
}

TEST(Profile, WhatOnlyCallsOthersIsNoKindOfOperator) {
  for (const char* name :
       {"forward transformer.h.0", "forward norm_f", "aten::view", "aten::to",
        "torch::autograd::CppNode<trireme::nn::Linear>", "autograd::engine::evaluate_function"})
    EXPECT_EQ(operator_group(name), "") << name;
  EXPECT_EQ(operator_group("gather transformer.h.0"), "communication");
  EXPECT_EQ(operator_group("aten::add_"), "elementwise");
  EXPECT_EQ(operator_group("trireme::add_column_sums"), "bias");
  EXPECT_EQ(operator_group("trireme::fp8_cast"), "FP8 casts");
  EXPECT_EQ(operator_group("aten::conv2d"), "convolution") << "what it calls is not counted again";
  EXPECT_EQ(operator_group("aten::embedding_dense_backward"), "embedding");
}

class ProfiledRun : public TrainerTest {};

/// An operator that another one calls is that one's, so that nothing counts twice: the groups of one thread
/// and the rest are the step.
TEST_F(ProfiledRun, SumsUpOperatorsOfTheCpu) {
  config_.train.steps = 4;
  config_.train.profile_steps = 2;
  for (const int ranks : {1, 2}) {
    const TrainResult result = run(ranks);
    ASSERT_TRUE(result.summary.profile.has_value());
    const KernelProfile& profile = *result.summary.profile;
    EXPECT_FALSE(profile.of_gpu);
    EXPECT_EQ(profile.steps, 2);
    std::set<std::string> names;
    double sum = 0.0;
    for (const KernelGroup& group : profile.groups) {
      names.insert(group.name);
      sum += group.ms;
      EXPECT_GT(group.ms, 0.0) << group.name;
    }
    for (const char* name : {"GEMM", "attention", "norm", "loss", "optimizer", "activation"})
      EXPECT_TRUE(names.contains(name)) << name << " on " << ranks;
    EXPECT_GT(profile.idle_ms, 0.0);
    EXPECT_LT(profile.idle_ms, profile.step_ms);
    if (ranks == 1) {
      EXPECT_NEAR(sum + profile.idle_ms, profile.step_ms, 1e-3 * profile.step_ms);
    }
    std::ifstream file(options().trace_path);
    const auto trace = nlohmann::json::parse(file);
    EXPECT_TRUE(std::ranges::any_of(trace["traceEvents"], [](const nlohmann::json& event) {
      return event.value("name", "") == "trireme::matmul" && event.value("dur", 0.0) > 0.0;
    }));
    EXPECT_TRUE(std::ranges::is_sorted(profile.groups, std::greater<>(), &KernelGroup::ms));
  }
}

TEST_F(ProfiledRun, WithoutProfiledStepsThereIsNone) {
  config_.train.steps = 2;
  EXPECT_FALSE(run(1).summary.profile.has_value());
}

}  // namespace
}  // namespace trireme::train
