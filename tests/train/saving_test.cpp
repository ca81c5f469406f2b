// What a run saves on its way: how many checkpoints it keeps, what a save costs, and that none can end it.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/saved_copy.h"

namespace trireme::train {
namespace {

TEST_F(Resume, NothingIsWrittenUnlessItIsAskedFor) {
  config_.checkpoint.every = 0;
  EXPECT_EQ(run(2, false).summary.checkpoints, 0);
  EXPECT_FALSE(std::filesystem::exists(checkpoints()));
}

TEST_F(Resume, KeepsAsManyAsItIsTold) {
  config_.checkpoint.every = 2;
  config_.checkpoint.keep = 3;
  const auto there = [&] {
    return std::ranges::count_if(std::filesystem::directory_iterator(checkpoints()),
                                 [](const auto& entry) { return entry.is_directory(); });
  };
  EXPECT_EQ(run(2, false).summary.checkpoints + recorder_.summary.checkpoints_late, 6);
  EXPECT_LE(there(), 3);
  EXPECT_GE(there(), 2);
  // What an attempt that died has left too much goes with the next, though that has nothing to save.
  config_.checkpoint.keep = 1;
  EXPECT_EQ(run(2, true).summary.checkpoints, 0);
  EXPECT_EQ(there(), 1);
}

/// A run that goes on from the last intact checkpoint does not remove it in favour of a damaged one.
TEST_F(Resume, KeepsWhatWasReadBack) {
  config_.train.steps = 8;
  config_.checkpoint.async = false;
  ASSERT_EQ(run(2, false).summary.checkpoints, 2);
  const std::string shard = checkpoints() + "/step-00000008/shard-00000.safetensors";
  std::string bytes = read_file(shard);
  bytes.back() ^= 1;
  write_file_atomic(shard, bytes);
  config_.checkpoint.keep = 2;
  EXPECT_EQ(run(2, true).summary.checkpoints, 1);
  EXPECT_TRUE(std::filesystem::exists(checkpoints() + "/step-00000008.2"));
  EXPECT_TRUE(checkpoint::Checkpoint(checkpoints() + "/step-00000004").verify().empty());
}

/// The folder is gone: a warning each, and the same weights.
TEST_F(Resume, TrainingGoesOnWhereNothingCanBeWritten) {
  config_.checkpoint.async = false;
  const std::string digest = run(2, false).summary.weights_digest;
  std::filesystem::remove_all(checkpoints());
  after_step_ = [&](int64_t step) {
    if (step == 5) std::filesystem::remove_all(checkpoints());
  };
  const TrainResult result = run(2, false);
  EXPECT_EQ(result.summary.weights_digest, digest);
  EXPECT_EQ(result.summary.checkpoints, 1);
  EXPECT_EQ(result.summary.checkpoints_failed, 2);
}

/// Two ranks that fail alike leave no part of the save under way out.
TEST_F(Resume, AnOrderlyFailureDoesNotGiveTheSaveUnderWayUp) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  config_.train.val_every = 0;
  config_.checkpoint.every = 1;
  EXPECT_THROW(run(2, false), NumericsError);
  ASSERT_FALSE(recorder_.steps.empty());
  const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints()));
  ASSERT_NE(newest.checkpoint, nullptr);
  EXPECT_GE(newest.checkpoint->commit().step, 1);
}

TEST_F(Resume, SaysWhatASaveHasCost) {
  config_.checkpoint.async = false;
  run(2, false);
  for (const StepRecord& step : recorder_.steps)
    EXPECT_EQ(step.checkpoint_ms.has_value(), step.step % 4 == 0) << step.step;
}

/// What each rank has copied, from the sizes of the pieces in its file.
std::vector<int64_t> copied_by_rank(const std::string& checkpoint) {
  const checkpoint::Checkpoint found(checkpoint);
  std::vector<int64_t> bytes(found.index().files.size(), 0);
  for (const auto& [name, tensor] : found.index().tensors) {
    const int64_t itemsize = checkpoint::safetensors_itemsize(tensor.dtype);
    for (const checkpoint::StoredPiece& piece : tensor.pieces)
      bytes[piece.file] += plan::saved_piece_bytes(piece.region.numel() * itemsize);
  }
  return bytes;
}

TEST_F(Resume, TheCopyOfASaveIsAsLargeAsPredicted) {
  config_.train.steps = 2;
  config_.train.global_batch = 24;
  config_.checkpoint.every = 2;
  config_.train.val_every = 0;
  config_.model.n_layers = 4;
  const auto expect_as_predicted = [&](int64_t ranks, int64_t more = 0) {
    std::filesystem::remove_all(checkpoints());
    const RunCost cost = run(ranks, false).summary.cost;
    const std::vector<int64_t> copied = copied_by_rank(checkpoints() + "/step-00000002");
    const int64_t most = *std::ranges::max_element(copied);
    const int64_t predicted = plan::rank_bytes(config_, ranks, plan::Device::kCpu).saved_copy;
    EXPECT_LE(predicted, most);
    EXPECT_GE(predicted, most - more);
    EXPECT_EQ(cost.measured_copy_bytes, copied.front());
    EXPECT_GT(cost.predicted_copy_bytes, 0);
  };
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    SCOPED_TRACE(plan::name(policy));
    config_.parallel.policy = policy;
    expect_as_predicted(3);
  }
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.hook_start = 0;
  for (const plan::CommHook hook :
       {plan::CommHook::kInt8, plan::CommHook::kTopK, plan::CommHook::kPowerSgd}) {
    SCOPED_TRACE(plan::name(hook));
    config_.parallel.comm_hook = hook;
    expect_as_predicted(2);
  }
  config_.parallel.comm_hook = plan::CommHook::kNone;
  SCOPED_TRACE("of shards with replicas");
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.parallel.sharding = plan::Sharding::kHybridShard;
  config_.parallel.dp_replicate = 2;
  expect_as_predicted(4);
  config_.parallel = {};
  SCOPED_TRACE("of one moment");
  config_.optim.name = plan::OptimizerName::kSgd;
  config_.optim.momentum = 0.9;
  expect_as_predicted(2);
  config_.optim.ema = 0.9;
  SCOPED_TRACE("of one moment and an average");
  expect_as_predicted(2);
  config_.optim.ema = 0.0;
  SCOPED_TRACE("of a hook that owes");
  config_.parallel.comm_hook = plan::CommHook::kTopK;
  config_.parallel.hook_start = 1;
  config_.parallel.hook_density = 0.1;
  const int64_t counts =
      64 * static_cast<int64_t>(12 * config_.model.n_layers + 5);  // of its steps, by rank 0
  expect_as_predicted(2, counts);
  SCOPED_TRACE("of ranks with moments of their own");
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.local_steps = 2;
  expect_as_predicted(2);
  config_.parallel = {};
  for (const bool tied : {true, false}) {
    SCOPED_TRACE("of stages");
    config_.model.tie_embeddings = tied;
    config_.parallel.pp = 2;
    expect_as_predicted(4);
  }
  SCOPED_TRACE("of parts of a head");
  config_.pipeline.spread_head = true;
  for (const bool tied : {true, false}) {
    config_.model.tie_embeddings = tied;
    expect_as_predicted(4);
  }
}

TEST_F(Resume, ASaveThatTrainingWaitsForNeedsNoCopy) {
  config_.train.steps = 2;
  config_.checkpoint.every = 2;
  std::vector<std::string> saved;
  for (const bool async : {true, false}) {
    config_.checkpoint.async = async;
    std::filesystem::remove_all(checkpoints());
    const RunCost cost = run(2, false).summary.cost;
    EXPECT_EQ(cost.measured_copy_bytes > 0, async);
    EXPECT_EQ(cost.predicted_copy_bytes > 0, async);
    for (const char* shard : {"/shard-00000.safetensors", "/shard-00001.safetensors"})
      saved.push_back(read_file(checkpoints() + "/step-00000002" + shard));
  }
  EXPECT_TRUE(saved[0] == saved[2] && saved[1] == saved[3]) << "the same bytes";
}

}  // namespace
}  // namespace trireme::train
