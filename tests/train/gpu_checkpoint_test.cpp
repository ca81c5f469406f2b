// Saving on one GPU: the state is copied while the next step is under way, and yet is that of its own step.
// Skipped without a GPU.
#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/comm/gpu_ranks.h"
#include "tests/train/trainer_fixture.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/pinned_memory.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/saved_copy.h"

namespace trireme::train {
namespace {

class GpuCheckpoint : public TrainerTest {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
    TrainerTest::SetUp();
    // A step of few tokens is over long before 0.6 GB are copied.
    plan::ModelConfig model;
    model.family = plan::ModelFamily::kLlama;
    model.n_layers = 4;
    model.d_model = 1024;
    model.n_heads = 8;
    config_.device = plan::Device::kCuda;
    config_.precision.compute = plan::Dtype::kBf16;
    config_.data.seq_len = 16;
    config_.model = plan::complete(model, config_.data.seq_len);
    config_.train = {.steps = 3, .global_batch = 1, .val_batches = 0, .sample_tokens = 0};
    config_.checkpoint = {.final_weights = false, .every = 2, .keep = 0};
  }
  void TearDown() override {
    if (!folder_.empty()) TrainerTest::TearDown();
  }

  std::string checkpoints() const { return (folder_ / "checkpoints").string(); }

  /// The bytes of the checkpoint after step 2, of a run that went on to step 3.
  std::string saved_after_two_steps(bool async) {
    config_.checkpoint.async = async;
    std::filesystem::remove_all(checkpoints());
    const auto world = test::one_gpu();
    TrainOptions mine = options();
    mine.checkpoint_dir = checkpoints();
    train(mine, world);
    const std::string path = checkpoints() + "/step-00000002/shard-00000.safetensors";
    std::string bytes(std::filesystem::file_size(path), '\0');
    std::ifstream(path, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }
};

TEST_F(GpuCheckpoint, HoldsTheStateOfItsStepThoughTrainingGoesOn) {
  for (const plan::OptimState state : plan::all_values<plan::OptimState>()) {
    SCOPED_TRACE(plan::name(state));
    config_.optim.state = state;
    const std::string waited = saved_after_two_steps(/*async=*/false);
    const int64_t predicted = plan::rank_bytes(config_, 1, plan::Device::kCuda).saved_copy;
    EXPECT_GE(static_cast<int64_t>(waited.size()), predicted * 99 / 100);
    EXPECT_TRUE(saved_after_two_steps(/*async=*/true) == waited) << "the same bytes";
  }
}

TEST_F(GpuCheckpoint, MemoryIsPinnedAndNoLargerThanPlanned) {
  const int64_t wanted = (int64_t{64} << 20) + 1;
  kernels::PinnedMemory memory(wanted);
  ASSERT_EQ(memory.problem(), "");
  EXPECT_EQ(memory.bytes(), plan::pinned_bytes(wanted));
  const auto* bytes = static_cast<const char*>(memory.data());
  EXPECT_EQ(std::count(bytes, bytes + memory.bytes(), 0), memory.bytes());
  // Before its first tensor on a GPU, torch takes all memory for pageable.
  const at::Tensor on_gpu = at::zeros({1}, at::kCUDA);
  EXPECT_TRUE(at::from_blob(memory.data(), {memory.bytes()}, at::kByte).is_pinned());
  const kernels::PinnedMemory moved = std::move(memory);
  EXPECT_EQ(moved.data(), bytes);
  EXPECT_EQ(memory.data(), nullptr);  // NOLINT(bugprone-use-after-move): what moving leaves
  EXPECT_EQ(kernels::PinnedMemory(0).data(), nullptr);
}

}  // namespace
}  // namespace trireme::train
