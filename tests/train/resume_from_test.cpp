// Which checkpoint a run goes on from, and which of its weights before were the best.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/plan/mesh_shape.h"
#include "trireme/state/state_file.h"
#include "trireme/train/best_weights.h"

namespace trireme::train {
namespace {

TEST_F(Resume, TakesTheOneBeforeWhereTheNewestIsDamaged) {
  config_.checkpoint.async = false;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  const std::string digest = run(2, false).summary.weights_digest;
  const std::string newest = checkpoints() + "/step-00000012/shard-00001.safetensors";
  std::fstream file(newest, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('?');
  file.close();
  const TrainResult result = run(2, true);
  EXPECT_EQ(result.summary.resumed_at, 8);
  EXPECT_EQ(result.summary.weights_digest, digest);
  EXPECT_EQ(checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints())).checkpoint->commit().step, 12);
}

TEST_F(Resume, FailsWhereNoneCanBeReadAndBeginsWhereThereIsNone) {
  EXPECT_EQ(run(2, true).summary.resumed_at, 0);
  EXPECT_EQ(recorder_.steps.size(), 12u);
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints())) {
    if (entry.is_directory()) std::filesystem::resize_file(entry.path() / "index.json", 1);
  }
  EXPECT_THROW(run(2, true), DataError);
}

TEST_F(Resume, GoesOnFromTheOneThatIsNamed) {
  config_.checkpoint.keep = 0;
  const std::string digest = run(2, false).summary.weights_digest;
  resume_from_ = checkpoints() + "/step-00000004";
  const TrainResult result = run(2, true);
  EXPECT_EQ(result.summary.resumed_at, 4);
  EXPECT_EQ(result.summary.weights_digest, digest);
  resume_from_ = checkpoints() + "/step-00000005";
  EXPECT_THROW(run(2, true), Error);
}

TEST_F(Resume, ARunThatWentBackIsNotFoundInTheBranchThatItLeft) {
  config_.checkpoint.keep = 0;
  const std::string left = run(2, false).summary.weights_digest;
  const auto names = [&] { return checkpoint::Folder(checkpoints()).names(); };
  const std::vector<std::string> before = names();
  resume_from_ = checkpoints() + "/step-00000004";
  config_.seed += 1;
  EXPECT_THROW(run(2, true), ConfigError);
  EXPECT_EQ(names(), before) << "a resume that is refused sets nothing aside";
  config_.seed -= 1;

  config_.optim.lr *= 0.5;
  config_.checkpoint.every = 0;  // it ends before it has saved anything
  EXPECT_EQ(run(2, true, 6).summary.resumed_at, 4);
  config_.checkpoint.every = 4;
  resume_from_.clear();
  const TrainResult again = run(2, true);
  EXPECT_EQ(again.summary.resumed_at, 4);
  EXPECT_NE(again.summary.weights_digest, left);

  config_.optim.lr *= 2.0;
  resume_from_ = checkpoints() + "/step-00000012.undone";
  EXPECT_EQ(run(2, true).summary.weights_digest, left);
  resume_from_.clear();
  EXPECT_EQ(run(2, true).summary.resumed_at, 12);
}

/// Ten steps are its warm-up only where there are twenty.
TEST_F(Resume, ARunThatIsStoppedEarlyHasASpeed) {
  config_.train.steps = 400;
  const TrainResult stopped = run(1, false, 2);
  ASSERT_LT(stopped.summary.steps, 10);
  EXPECT_GT(stopped.summary.steps_per_s, 0.0);
  EXPECT_DOUBLE_EQ(
      stopped.summary.tokens_per_s,
      stopped.summary.steps_per_s * static_cast<double>(config_.train.global_batch * config_.data.seq_len));
}

TEST_F(Resume, ARunThatHasACheckpointIsResumableThoughItHasSavedNone) {
  run(2, false, 4);
  config_.checkpoint.every = 0;
  const TrainResult again = run(2, true, 7);
  EXPECT_EQ(again.stop_signal, SIGTERM);
  EXPECT_EQ(again.summary.checkpoints, 0);
  EXPECT_TRUE(again.resumable);
  EXPECT_FALSE(run(2, false, 2).resumable);
}

TEST_F(Resume, KnowsTheBestWeightsOfBefore) {
  config_.checkpoint.best = true;
  config_.train.val_every = 1;
  config_.optim = {.lr = 2.0, .schedule = plan::LrSchedule::kConstant, .weight_decay = 0.0};
  const std::string path = options().best_weights_path;
  const TrainResult whole = run(2, false);
  const std::string best = read_file(path);
  ASSERT_GT(whole.summary.best_step, 0);
  ASSERT_LT(whole.summary.best_step, 8) << "so that a run that goes on from step 8 has nothing better";
  std::filesystem::remove_all(checkpoints());
  std::filesystem::remove(path);
  run(2, false, 8);
  EXPECT_EQ(run(2, true).summary.best_step, whole.summary.best_step);
  EXPECT_EQ(read_file(path), best);

  std::filesystem::remove_all(checkpoints());
  run(2, false, 8);
  write_file_atomic(path, "none of ours");
  ::testing::internal::CaptureStderr();
  EXPECT_GT(run(2, true).summary.best_step, 8);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("best weights so far are unknown"),
            std::string::npos);
}

TEST_F(Resume, AScoreThatIsNoNumberIsNoneOfBefore) {
  config_.checkpoint.best = true;
  config_.train.val_every = 1;
  run(2, false, 4);
  const std::string path = options().best_weights_path;
  checkpoint::SafetensorsWriter(path, {}, {{"note.step", "3"}, {"note.score", "nan"}}).commit();
  EXPECT_GT(run(2, true).summary.best_step, 4);
}

/// Weights of a branch that was left would never be displaced where the other branch is worse.
TEST_F(Resume, TheBestWeightsAreOfStepsThatTheRunHasMade) {
  config_.checkpoint.best = true;
  config_.checkpoint.keep = 0;
  config_.train.val_every = 1;
  config_.train.steps = 8;
  run(2, false);
  ASSERT_GT(recorder_.summary.best_step, 4);
  const std::string path = options().best_weights_path;
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    BestValidation none;  // as checkpoints of old versions have it
    EXPECT_EQ(BestWeights(path, 8, mesh, {}, none).step(), recorder_.summary.best_step);
    none = {};
    const BestWeights undone(path, 4, mesh, {}, none);
    EXPECT_EQ(undone.step(), 0);
    EXPECT_FALSE(std::filesystem::exists(path));
    EXPECT_TRUE(std::filesystem::exists(undone.aside())) << "until there are others";
    std::filesystem::rename(undone.aside(), path);
  });
  resume_from_ = checkpoints() + "/step-00000004";
  config_.optim.lr = 0.0;
  run(2, true);
  EXPECT_EQ(recorder_.summary.best_step, 5) << "the first of steps that learn nothing";
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(path + ".undone"));
}

/// A checkpoint knows the best validation of its branch, so one that is worse than that displaces nothing.
TEST_F(Resume, WorseWeightsThanThoseOfBeforeAreNotTheBest) {
  config_.checkpoint.best = true;
  config_.checkpoint.keep = 0;
  config_.train.val_every = 1;
  config_.train.steps = 8;
  run(2, false);
  const std::string path = options().best_weights_path, kept = read_file(path);
  ASSERT_GT(recorder_.summary.best_step, 4);
  resume_from_ = checkpoints() + "/step-00000004";
  config_.optim.lr = 5.0;
  run(2, true);
  EXPECT_EQ(recorder_.summary.best_step, 0) << "nothing was as good as step 3";
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(read_file(path + ".undone"), kept);
}

/// The file may be of another branch that has come to the same steps.
TEST_F(Resume, WeightsOfAnotherBranchAreNotItsBest) {
  config_.checkpoint.best = true;
  config_.train.val_every = 1;
  run(2, false, 8);
  const std::string path = options().best_weights_path;
  test::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 1));
    const state::Notes notes = state::read_notes(path);
    const double score = std::stod(notes.at("score"));
    const int64_t step = std::stoll(notes.at("step"));
    BestValidation ours{.step = step, .score = score};
    EXPECT_EQ(BestWeights(path, step + 1, mesh, {}, ours).step(), step);
    BestValidation later{.step = step - 1, .score = score - 1.0};
    EXPECT_EQ(BestWeights(path, step, mesh, {}, later).step(), step) << "validated right after the save";
    EXPECT_EQ(later.step, step);
    BestValidation theirs{.step = step, .score = score - 1.0};
    EXPECT_EQ(BestWeights(path, step + 1, mesh, {}, theirs).step(), 0);
    EXPECT_EQ(theirs.score, score - 1.0);
    EXPECT_TRUE(std::filesystem::exists(path + ".undone"));
  });
}

}  // namespace
}  // namespace trireme::train
