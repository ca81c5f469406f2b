// Models of images in two stages on two GPUs learn what the model in one piece learns on one GPU: through
// peer memory and over NCCL. One process a GPU; skipped with fewer than two GPUs.
#include <ATen/Context.h>

#include <cstdlib>

#include "tests/comm/gpu_ranks.h"
#include "tests/train/staged_images_fixture.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::train {
namespace {

using plan::ImageNorm;
using plan::ScheduleName;

class GpuStagedImages : public StagedImages {
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

  /// All cases on one rank of two; the first compares. `share`: ranks write into each other's memory; else
  /// messages travel over NCCL.
  int run_cases(int64_t rank, bool share) {
    // NCCL's kernels wait for the other GPU, which may wait for a kernel that is still to be loaded.
    if (!share) ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    at::globalContext().setAllowTF32CuDNN(false);
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {.share = share});
    for (const ImageNorm norm : {ImageNorm::kBatch, ImageNorm::kGroup}) {
      config_.model.vision.norm = norm;
      Outcome whole;
      if (rank == 0) {
        whole = outcome_on(test::one_gpu());
      }
      for (const auto schedule : {ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
        // What differs over NCCL is how messages travel.
        if (!share && (norm == ImageNorm::kGroup) != (schedule == ScheduleName::kInterleaved1F1B)) continue;
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

  /// What one rank of two held between passes, by torch's allocator, beside what its program says.
  int measure_on(int64_t rank) {
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0);
    config_.model.vision.width = 64;
    config_.model = plan::complete(config_.model, 1);
    config_.train = {.steps = 3, .global_batch = 48, .micro_batch = 12, .profile_steps = 1};
    config_.train.deterministic = true;  // cuDNN's trials would take most of the time
    config_.parallel.pp = 2;
    for (const ImageNorm norm : {ImageNorm::kGroup, ImageNorm::kBatch}) {
      config_.model.vision.norm = norm;
      std::optional<plan::PipelineReport> report;
      TrainOptions mine = options();
      mine.show_pipeline = [&](const plan::PipelineReport& made) { report = made; };
      train(mine, world);
      if (rank != 0) continue;
      const auto planned = plan::bytes_by_pp_rank(config_, 2, plan::Device::kCuda);
      for (size_t of = 0; of < 2; ++of) {
        SCOPED_TRACE(fmt::format("norm={}, rank {}", norm, of));
        const double measured = report.value().measured.ranks[of].peak_bytes;
        EXPECT_NEAR(measured / static_cast<double>(planned[of].activations), 1.0, 0.05);
      }
    }
    return HasFailure() ? 1 : 0;
  }

  int64_t port_ = test::free_port();
};

class GpuStagedImagesOver : public GpuStagedImages, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Train, GpuStagedImagesOver, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Nccl"; });

TEST_P(GpuStagedImagesOver, LearnWhatTheModelInOnePieceLearns) {
  EXPECT_EQ(test::fork_ranks(
                2, [this](int64_t rank) { return run_cases(rank, GetParam()); }, 200.0),
            (std::vector<int>{0, 0}));
}

TEST_F(GpuStagedImages, HoldBetweenPassesWhatTheProgramOfTheStageSays) {
  EXPECT_EQ(test::fork_ranks(
                2, [this](int64_t rank) { return measure_on(rank); }, 100.0),
            (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace trireme::train
