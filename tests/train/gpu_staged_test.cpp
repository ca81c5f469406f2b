// Runs in two stages on two GPUs learn what the model in one piece learns on one GPU: through peer memory and
// over NCCL, with the head in the last stage and spread over both. One process a GPU; skipped with fewer than
// two GPUs.
#include <cstdlib>

#include "tests/comm/gpu_ranks.h"
#include "tests/train/staged_fixture.h"

namespace trireme::train {
namespace {

using plan::ScheduleName;

/// Whether ranks write into each other's memory; else messages travel over NCCL.
class GpuStaged : public StagedTest, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
    StagedTest::SetUp();
    config_.device = plan::Device::kCuda;
  }
  void TearDown() override {
    if (!folder_.empty()) TrainerTest::TearDown();
  }

  /// Of the rank that makes the records and the file.
  Outcome outcome_on(const std::shared_ptr<comm::World>& world) {
    config_.parallel.pp = world->size();
    recorder_ = {};
    train(options(), world);
    const std::string path = (folder_ / "weights.safetensors").string();
    const checkpoint::SafetensorsReader reader(path);
    Outcome result{recorder_, {}, reader.metadata()};
    for (const auto& [name, info] : reader.tensors()) result.weights[name] = reader.read(name);
    return result;
  }

  /// All cases on one rank of two; the first compares.
  int run_cases(int64_t rank) {
    // NCCL's kernels wait for the other GPU, which may wait for a kernel that is still to be loaded.
    if (!GetParam()) ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {.share = GetParam()});
    for (const bool tied : {false, true}) {
      config_.model.tie_embeddings = tied;
      config_.pipeline.spread_head = false;
      Outcome whole;
      if (rank == 0) {
        whole = outcome_on(comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                                   c10::Device(c10::kCUDA, 0), /*timeout_s=*/60.0));
      }
      for (const auto schedule : {ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
        // What differs over NCCL is how messages travel.
        if (!GetParam() && tied != (schedule == ScheduleName::k1F1B)) continue;
        // Every pair of schedule, tie and place of the head.
        const bool spread = tied != (schedule == ScheduleName::kInterleaved1F1B);
        config_.pipeline.schedule = schedule;
        config_.pipeline.spread_head = spread;
        if (rank == 0) {
          expect_near(outcome_on(world), whole,
                      fmt::format("{}, {}, {}", schedule, tied ? "tied" : "untied",
                                  spread ? "spread" : "head in the last stage"));
        } else {
          config_.parallel.pp = 2;
          train(options(), world);
        }
      }
    }
    return HasFailure() ? 1 : 0;
  }

  int64_t port_ = test::free_port();
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
