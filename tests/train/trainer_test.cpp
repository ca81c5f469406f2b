// The whole loop on ranks as threads, over real text on disk.
#include "trireme/train/trainer.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"

namespace trireme::train {
namespace {

class Recorder : public Sink {
 public:
  void record(const StepRecord& step) override { steps.push_back(step); }
  void finish(const RunSummary& result) override { summary = result; }
  std::vector<StepRecord> steps;
  RunSummary summary;
};

class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("trireme-trainer-" + std::to_string(::getpid()) + "-" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_ / "text");
    for (int file = 0; file < 8; ++file) {
      std::ofstream out(folder_ / "text" / (std::to_string(file) + ".txt"));
      for (int line = 0; line < 60; ++line)
        out << "the rowers pull " << (line * 7 + file) % 10 << " strokes in time\n";
    }
    config_.model.n_layers = 2;
    config_.model.d_model = 32;
    config_.data.seq_len = 32;
    config_.data.path = (folder_ / "text").string();
    config_.data.val_fraction = 0.3;
    config_.model = plan::complete(config_.model, 32);
    config_.train = {.steps = 30, .global_batch = 8, .val_every = 10, .val_batches = 2, .sample_tokens = 12};
    config_.optim.lr = 1e-2;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  /// Trains on `ranks` threads; rank 0's records land in recorder_.
  TrainResult run(int64_t ranks) {
    at::set_num_threads(1);
    TrainResult result;
    recorder_ = {};
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      TrainOptions options;
      options.config = config_;
      options.cache_dir = (folder_ / "cache").string();
      options.weights_path = (folder_ / "weights.safetensors").string();
      options.sinks = {&recorder_};
      options.stop_signal = world->rank() == stop_rank_ ? &stop_ : nullptr;
      options.announce = false;
      const TrainResult mine = train(options, world);
      if (world->rank() == 0) result = mine;
    });
    return result;
  }

  std::filesystem::path folder_;
  plan::Config config_;
  Recorder recorder_;
  std::atomic<int> stop_{0};
  int64_t stop_rank_ = 0;
};

TEST_F(TrainerTest, ScalingByAPowerOfTwoChangesNoBitOfTheWeights) {
  run(2);
  const std::string plain = recorder_.summary.weights_digest;
  config_.precision.scaling = "dynamic";
  config_.precision.loss_scale.window = 7;
  run(2);
  EXPECT_EQ(recorder_.summary.weights_digest, plain);
  EXPECT_EQ(recorder_.steps.front().loss_scale, 65536.0);
  EXPECT_EQ(recorder_.steps.back().loss_scale, 65536.0 * 16.0);
}

TEST_F(TrainerTest, LearnsAndRecordsEveryStep) {
  const TrainResult result = run(2);
  ASSERT_EQ(recorder_.steps.size(), 30u);
  EXPECT_LT(recorder_.steps.back().loss, 0.7 * recorder_.steps.front().loss);
  for (size_t i = 0; i < recorder_.steps.size(); ++i) {
    const StepRecord& step = recorder_.steps[i];
    EXPECT_EQ(step.step, static_cast<int64_t>(i) + 1);
    EXPECT_EQ(step.tokens, step.step * 8 * 32);
    EXPECT_GT(step.grad_norm, 0.0);
    EXPECT_GT(step.peak_bytes, 0);
    EXPECT_EQ(step.val_loss.has_value(), step.step % 10 == 0);
  }
  EXPECT_EQ(result.summary.steps, 30);
  EXPECT_EQ(result.summary.final_val_loss, recorder_.steps.back().val_loss);
  EXPECT_EQ(result.summary.weights_digest.size(), 16u);
  EXPECT_EQ(result.summary.sample.size(), 13u) << "the prompt and 12 bytes";
  EXPECT_EQ(recorder_.summary.weights_digest, result.summary.weights_digest);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "weights.safetensors"));
}

TEST_F(TrainerTest, SameWeightsForDdpAndFsdpAndNearlySameLossForOneRank) {
  config_.parallel.policy = "ddp";
  const TrainResult ddp = run(4);
  config_.parallel.policy = "fsdp";
  const TrainResult fsdp = run(4);
  EXPECT_EQ(ddp.summary.weights_digest, fsdp.summary.weights_digest);
  const TrainResult one = run(1);
  EXPECT_NEAR(one.summary.final_loss, fsdp.summary.final_loss, 1e-4 * one.summary.final_loss);
  EXPECT_NEAR(*one.summary.final_val_loss, *fsdp.summary.final_val_loss, 1e-4 * *one.summary.final_val_loss);
}

TEST_F(TrainerTest, ASignalOnOneRankEndsAllRanksAfterTheStep) {
  stop_ = SIGINT;
  stop_rank_ = 1;
  const TrainResult result = run(2);
  EXPECT_EQ(result.stop_signal, SIGINT);
  EXPECT_EQ(result.summary.steps, 1);
  EXPECT_EQ(recorder_.steps.size(), 1u);
  EXPECT_TRUE(result.summary.final_val_loss.has_value()) << "the run directory is complete all the same";
}

TEST_F(TrainerTest, ANonFiniteLossIsANumericsErrorThatNamesTheStep) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  try {
    run(2);
    FAIL() << "a learning rate of 1e30 went unnoticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kNumerics);
    EXPECT_NE(std::string(error.what()).find("step "), std::string::npos) << error.what();
  }
}

TEST_F(TrainerTest, AMissingCorpusIsADataErrorOnEveryRank) {
  config_.data.path = (folder_ / "nowhere").string();
  try {
    run(2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kCorruptData) << error.what();
  }
}

TEST_F(TrainerTest, Bf16FollowsFp32) {
  const TrainResult fp32 = run(2);
  config_.precision.compute = "bf16";
  const TrainResult bf16 = run(2);
  EXPECT_NEAR(bf16.summary.final_loss, fp32.summary.final_loss, 0.05 * fp32.summary.final_loss);
}

}  // namespace
}  // namespace trireme::train
