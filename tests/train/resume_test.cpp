// A run that is ended and goes on from its checkpoint is the run that was never ended, bit for bit.
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/train/resume_fixture.h"

namespace trireme::train {
namespace {

TEST_F(Resume, IsExactForEveryPolicy) {
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    config_.checkpoint.async = policy != plan::PolicyName::kZero1;
    expect_exact(2, std::string(plan::name(policy)));
  }
}

TEST_F(Resume, IsExactForHybridShardingAndOnOneRank) {
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.parallel.sharding = plan::Sharding::kHybridShard;
  config_.parallel.dp_replicate = 2;
  expect_exact(4, "hybrid");
  config_.parallel = {};
  expect_exact(1, "one rank");
}

TEST_F(Resume, IsExactWithAverages) {
  config_.optim.ema = 0.8;
  expect_exact(2, "averages");
}

TEST_F(Resume, IsExactWithStateInFewerBits) {
  for (const plan::OptimState state : {plan::OptimState::kBf16, plan::OptimState::kInt8}) {
    config_.optim.state = state;
    for (const plan::PolicyName policy : {plan::PolicyName::kDdp, plan::PolicyName::kFsdp}) {
      config_.parallel.policy = policy;
      expect_exact(2, std::string(plan::name(state)));
    }
  }
}

TEST_F(Resume, IsExactInBf16AndWithDropout) {
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.precision.compute = plan::Dtype::kBf16;
  expect_exact(2, "bf16");
  config_.precision.compute = plan::Dtype::kFp32;
  config_.model.dropout = 0.1;
  expect_exact(1, "dropout");  // threads share one generator, processes have their own
}

TEST_F(Resume, IsExactWithDelayedScalesOfFp8) {
  config_.precision.compute = plan::Dtype::kBf16;
  config_.precision.fp8 = {.recipe = plan::Fp8::kTensorwise,
                           .scales = plan::Fp8Scales::kDelayed,
                           .history = 3,
                           .fallback = plan::Fp8Fallback::kEmulate};
  expect_exact(2, "delayed");

  // Without the history, or with blocks that it knows nothing of, the first step has scales of its own.
  const auto goes_on = [&] {
    ::testing::internal::CaptureStderr();
    run(2, true, 8);
    return ::testing::internal::GetCapturedStderr();
  };
  constexpr const char* kLost = "has no FP8 history";
  for (const bool skips : {false, true}) {
    std::filesystem::remove_all(checkpoints());
    config_.precision.fp8.scales = skips ? plan::Fp8Scales::kDelayed : plan::Fp8Scales::kDynamic;
    if (skips) config_.precision.fp8.skip = *plan::parse_skip("last");
    run(2, false, 4);
    if (skips) {
      EXPECT_EQ(goes_on().find(kLost), std::string::npos);
    }
    config_.precision.fp8.scales = plan::Fp8Scales::kDelayed;
    config_.precision.fp8.skip = {};
    EXPECT_NE(goes_on().find(kLost), std::string::npos) << skips;
    EXPECT_FALSE(recorder_.steps.empty());
  }
}

TEST_F(Resume, IsExactWithHooksThatOwe) {
  config_.parallel.hook_start = 3;  // before the first stop is over
  config_.parallel.hook_density = 0.1;
  config_.parallel.hook_rank = 2;
  using plan::CommHook;
  for (const CommHook hook : {CommHook::kFp16, CommHook::kInt8, CommHook::kTopK, CommHook::kPowerSgd}) {
    config_.parallel.comm_hook = hook;
    config_.parallel.policy = hook == CommHook::kInt8 ? plan::PolicyName::kFsdp : plan::PolicyName::kDdp;
    expect_exact(2, std::string(plan::name(hook)));
  }
}

/// Ranks of local SGD are saved where they have averaged, with moments of their own; a run that is stopped in
/// between goes on from there.
TEST_F(Resume, IsExactWithLocalSgd) {
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.local_steps = 2;
  config_.train.val_every = 0;
  config_.checkpoint.keep = 0;
  const std::string digest = run(2, false).summary.weights_digest;
  const std::vector<StepRecord> steps = recorder_.steps;
  for (const int64_t stop_at : {4, 5}) {
    std::filesystem::remove_all(checkpoints());
    const TrainResult first = run(2, false, stop_at);
    EXPECT_TRUE(first.resumable);
    const TrainResult last = run(2, true);
    const int64_t stopped_at = first.summary.steps;
    EXPECT_EQ(last.summary.resumed_at, stopped_at % 2 == 0 ? stopped_at : 4) << stop_at;
    EXPECT_EQ(last.summary.weights_digest, digest) << stop_at;
    const auto made_again = steps.begin() + static_cast<int64_t>(last.summary.resumed_at);
    expect_same_steps(recorder_.steps, {made_again, steps.end()});
  }
  const double loss = recorder_.steps.back().loss;
  std::filesystem::remove_all(checkpoints());
  run(2, false, 4);
  config_.parallel.comm_hook = plan::CommHook::kNone;
  EXPECT_NEAR(run(4, true).summary.final_loss, loss, 0.1 * loss) << "with the mean of moments";
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.local_steps = 3;
  config_.checkpoint.every = 3;
  resume_from_ = checkpoints() + "/step-00000004";
  test::expect_refusal([&] { run(2, true); }, {"step 4", "parallel.local_steps=3"});
}

TEST_F(Resume, IsExactInStages) {
  config_.model.n_layers = 4;
  config_.parallel.pp = 2;
  config_.train.micro_batch = 1;
  const std::pair<plan::ScheduleName, plan::PolicyName> pairs[] = {
      {plan::ScheduleName::k1F1B, plan::PolicyName::kDdp},
      {plan::ScheduleName::kZbV, plan::PolicyName::kFsdp},
      {plan::ScheduleName::kDualPipe, plan::PolicyName::kZero2}};
  for (const auto& [schedule, policy] : pairs) {
    config_.model.tie_embeddings = schedule != plan::ScheduleName::kZbV;
    config_.pipeline.schedule = schedule;
    config_.parallel.policy = policy;
    expect_exact(4, std::string(plan::name(schedule)));
  }
}

}  // namespace
}  // namespace trireme::train
