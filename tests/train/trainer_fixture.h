#pragma once
// A tiny run over real text on disk: on ranks as threads, or on one GPU.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/spawn.h"
#include "trireme/comm/agree.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

class Recorder : public Sink {
 public:
  void record(const StepRecord& step) override { steps.push_back(step); }
  void finish(const RunSummary& result) override {
    summary = result;
    finished = true;
  }
  std::vector<StepRecord> steps;
  RunSummary summary;
  bool finished = false;
};

/// Everything of a step but its times and its memory.
inline void expect_same_steps(const std::vector<StepRecord>& got, const std::vector<StepRecord>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].step, wanted[i].step);
    EXPECT_EQ(got[i].loss, wanted[i].loss) << "step " << wanted[i].step;
    EXPECT_EQ(got[i].grad_norm, wanted[i].grad_norm) << "step " << wanted[i].step;
    EXPECT_EQ(got[i].lr, wanted[i].lr) << "step " << wanted[i].step;
    EXPECT_EQ(got[i].tokens, wanted[i].tokens) << "step " << wanted[i].step;
    EXPECT_EQ(got[i].val_loss, wanted[i].val_loss) << "step " << wanted[i].step;
  }
}

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

  TrainOptions options() {
    TrainOptions made;
    made.config = config_;
    made.cache_dir = (folder_ / "cache").string();
    made.weights_path = (folder_ / "weights.safetensors").string();
    made.best_weights_path = (folder_ / "best" / "weights.safetensors").string();
    made.trace_path = (folder_ / "traces" / "rank-0.json").string();
    made.sinks = {&recorder_};
    made.sinks.insert(made.sinks.end(), more_sinks_.begin(), more_sinks_.end());
    made.announce = announce_;
    made.run_ahead = run_ahead_;
    return made;
  }

  /// Trains on `ranks` threads; rank 0's records land in recorder_.
  TrainResult run(int64_t ranks) {
    at::set_num_threads(1);
    TrainResult result;
    recorder_ = {};
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      TrainOptions mine = options();
      mine.stop_signal = world->rank() == stop_rank_ ? &stop_ : nullptr;
      try {
        const TrainResult outcome = train(mine, world);
        if (world->rank() == 0) result = outcome;
      } catch (const comm::FailedElsewhere&) {  // the rank that knows why is the one to be heard
      }
    });
    return result;
  }

  std::filesystem::path folder_;
  plan::Config config_;
  std::optional<bool> run_ahead_;
  bool announce_ = false;
  Recorder recorder_;
  std::vector<Sink*> more_sinks_;
  std::atomic<int> stop_{0};
  int64_t stop_rank_ = 0;
};

}  // namespace trireme::train
