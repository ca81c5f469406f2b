// Runs in two stages on two GPUs learn what the model in one piece learns on one GPU: through peer memory and
// over NCCL, with the head in the last stage and spread over both. One process a GPU; skipped with fewer than
// two GPUs.
#include "tests/train/gpu_staged_fixture.h"

namespace trireme::train {
namespace {

using plan::ScheduleName;

/// Whether ranks write into each other's memory; else messages travel over NCCL.
class GpuStaged : public GpuRanksTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override { set_up_on(2); }

  /// All cases on one rank of two; the first compares.
  int run_cases(int64_t rank) {
    if (!GetParam()) load_kernels_at_once();
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {.share = GetParam()});
    for (const bool tied : {false, true}) {
      config_.model.tie_embeddings = tied;
      config_.pipeline.spread_head = false;
      Outcome whole;
      config_.parallel.pp = 1;
      if (rank == 0) whole = outcome_on(test::one_gpu());
      for (const auto schedule : {ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
        // What differs over NCCL is how messages travel.
        if (!GetParam() && tied != (schedule == ScheduleName::k1F1B)) continue;
        // Every pair of schedule, tie and place of the head.
        const bool spread = tied != (schedule == ScheduleName::kInterleaved1F1B);
        config_.parallel.pp = 2;
        config_.pipeline.schedule = schedule;
        config_.pipeline.spread_head = spread;
        const Outcome staged = outcome_on(world);
        if (rank != 0) continue;
        expect_near(staged, whole,
                    fmt::format("{}, {}, {}", schedule, tied ? "tied" : "untied",
                                spread ? "spread" : "head in the last stage"));
      }
    }
    return HasFailure() ? 1 : 0;
  }
};
INSTANTIATE_TEST_SUITE_P(Train, GpuStaged, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Nccl"; });

TEST_P(GpuStaged, LearnsWhatTheModelInOnePieceLearns) {
  EXPECT_EQ(test::fork_ranks(
                2, [this](int64_t rank) { return run_cases(rank); }, 200.0),
            (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace trireme::train
