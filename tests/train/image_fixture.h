#pragma once
// Runs on a few images of three classes, which tests write.
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/data/image_files.h"
#include "tests/support/refusal.h"
#include "tests/train/trainer_fixture.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::train {

inline constexpr int64_t kTrained = 22, kHeldOut = 10, kSide = 8, kClasses = 3;

/// Stops a run once a step is recorded.
class StopAfter : public Sink {
 public:
  StopAfter(int64_t step, std::atomic<int>& signal) : step_(step), signal_(signal) {}
  void record(const StepRecord& step) override {
    if (step.step == step_) signal_ = SIGTERM;
  }
  void finish(const RunSummary&) override {}

 private:
  int64_t step_;
  std::atomic<int>& signal_;
};

class ImageRuns : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    std::filesystem::create_directories(folder_ / "images");
    write_split("train", kTrained);
    write_split("t10k", kHeldOut);
    config_ = plan::Config();
    config_.data.path = (folder_ / "images").string();
    config_.model.family = plan::ModelFamily::kResNet;
    config_.model.vision = {.depth = 8,
                            .width = 8,
                            .norm = plan::ImageNorm::kGroup,
                            .norm_groups = 2,
                            .channels = 1,
                            .image_size = kSide,
                            .classes = kClasses};
    config_.model = plan::complete(config_.model, 1);
    config_.data.seq_len = 1;
    config_.train = {.epochs = 3, .global_batch = 6, .val_batches = 100};
    config_.optim = {.name = plan::OptimizerName::kSgd, .lr = 0.05, .weight_decay = 1e-3};
  }

  /// The class is what is bright: the left, the right, or the middle.
  static std::vector<uint8_t> pixels_of(int64_t count, int64_t index) {
    std::vector<uint8_t> pixels;
    for (int64_t place = 0; place < kSide * kSide; ++place) {
      const int64_t x = place % kSide, third = x < 3 ? 0 : x < 5 ? 2 : 1;
      const auto noise = static_cast<int64_t>(
          mix64(static_cast<uint64_t>(index + 1000 * count), static_cast<uint64_t>(place)) % 60);
      pixels.push_back(static_cast<uint8_t>(noise + (third == index % kClasses ? 150 : 0)));
    }
    return pixels;
  }

  void write_split(const std::string& split, uint32_t count) const {
    std::string pixels = testing::idx_header(0x803, {count, kSide, kSide});
    std::string labels = testing::idx_header(0x801, {count});
    for (uint32_t index = 0; index < count; ++index) {
      labels.push_back(static_cast<char>(index % kClasses));
      for (const uint8_t pixel : pixels_of(count, index)) pixels.push_back(static_cast<char>(pixel));
    }
    const std::string base = (folder_ / "images" / split).string();
    std::ofstream(base + "-images-idx3-ubyte", std::ios::binary) << pixels;
    std::ofstream(base + "-labels-idx1-ubyte", std::ios::binary) << labels;
  }

  /// Trains as one rank of `world`; a signal comes when step `stop_at` is recorded, 0: never. Rank 0 records.
  TrainResult train_in(const std::shared_ptr<comm::World>& world, int64_t stop_at = 0, bool resume = false) {
    StopAfter stopper(stop_at, stop_);
    TrainOptions mine = options();
    mine.resume = resume;
    if (world->rank() == 0) {
      mine.sinks = {&recorder_, &stopper};
      mine.stop_signal = &stop_;
      mine.checkpoint_dir = (folder_ / "checkpoints").string();
      mine.show_guesses = [this](const Classification& all) { guessed_.push_back(all); };
    }
    return train(mine, world);
  }

  void forget_records() {
    recorder_ = {};
    guessed_.clear();
    stop_ = 0;
  }

  /// Trains on `ranks` threads.
  TrainResult train_on(int64_t ranks, int64_t stop_at = 0, bool resume = false) {
    at::set_num_threads(1);
    forget_records();
    TrainResult result;
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      try {
        const TrainResult outcome = train_in(world, stop_at, resume);
        if (world->rank() == 0) result = outcome;
      } catch (const comm::FailedElsewhere&) {
      }
    });
    return result;
  }

  /// What was counted, and of the worst mistakes which they are.
  static std::string counted(const Classification& all) {
    std::string text =
        fmt::format("step {}, {} of {}: {};", all.step, all.right, all.images, fmt::join(all.confusion, " "));
    for (const Classification::Mistake& one : all.worst)
      text += fmt::format(" {} is {}, not {}", one.name, one.truth, one.guess);
    return text;
  }

  std::vector<Classification> guessed_;

  void expect_refused(const std::string& words, int64_t ranks = 1, bool resume = false) {
    test::expect_refusal([&] { train_on(ranks, 0, resume); }, {words});
  }
};

}  // namespace trireme::train
