// Models of images in two stages on two GPUs learn what the model in one piece learns on one GPU: through
// peer memory and over NCCL. One process a GPU; skipped with fewer than two GPUs.
#include <ATen/Context.h>

#include <cstdlib>

#include "tests/comm/gpu_ranks.h"
#include "tests/train/staged_images_fixture.h"

namespace trireme::train {
namespace {

using plan::ImageNorm;
using plan::ScheduleName;

/// Whether ranks write into each other's memory; else messages travel over NCCL.
class GpuStagedImages : public StagedImages, public ::testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
    StagedImages::SetUp();
    config_.device = plan::Device::kCuda;
    config_.train.deterministic = true;  // both sides have the same convolutions, not those of a trial
  }
  void TearDown() override {
    if (!folder_.empty()) StagedImages::TearDown();
  }

  /// Of the rank that makes the records and the file.
  Outcome outcome_on(const std::shared_ptr<comm::World>& world) {
    config_.parallel.pp = world->size();
    forget_records();
    train_in(world);
    return recorded();
  }

  /// All cases on one rank of two; the first compares.
  int run_cases(int64_t rank) {
    // NCCL's kernels wait for the other GPU, which may wait for a kernel that is still to be loaded.
    if (!GetParam()) ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    at::globalContext().setAllowTF32CuDNN(false);
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {.share = GetParam()});
    for (const ImageNorm norm : {ImageNorm::kBatch, ImageNorm::kGroup}) {
      config_.model.vision.norm = norm;
      Outcome whole;
      if (rank == 0) {
        whole = outcome_on(comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                                   c10::Device(c10::kCUDA, 0), /*timeout_s=*/60.0));
      }
      for (const auto schedule : {ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
        SCOPED_TRACE(fmt::format("{}, norm={}", schedule, norm));
        config_.pipeline.schedule = schedule;
        if (rank == 0) {
          expect_near(outcome_on(world), whole);
        } else {
          config_.parallel.pp = 2;
          train_in(world);
        }
      }
    }
    return HasFailure() ? 1 : 0;
  }

  int64_t port_ = test::free_port();
};
INSTANTIATE_TEST_SUITE_P(Train, GpuStagedImages, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Nccl"; });

TEST_P(GpuStagedImages, LearnWhatTheModelInOnePieceLearns) {
  EXPECT_EQ(test::fork_ranks(
                2, [this](int64_t rank) { return run_cases(rank); }, 200.0),
            (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace trireme::train
