// Runs on images: epochs whose last step is short, the same on any number of ranks, resumed in the middle of
// one, and refused where the model cannot read what is there.
#include <cmath>
#include <set>

#include "tests/train/image_fixture.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/checkpoint/source.h"

namespace trireme::train {
namespace {

TEST_F(ImageRuns, CountEverySampleOfAnEpochOnceAndValidateAfterIt) {
  const TrainResult result = train_on(2);
  ASSERT_EQ(recorder_.steps.size(), 12u) << "3 epochs of 6, 6, 6 and 4 images";
  for (const StepRecord& step : recorder_.steps) {
    const bool ends_epoch = step.step % 4 == 0;
    EXPECT_EQ(step.tokens,
              ends_epoch ? step.step / 4 * kTrained : step.step / 4 * kTrained + step.step % 4 * 6);
    EXPECT_EQ(step.val_loss.has_value(), ends_epoch) << step.step;
    EXPECT_EQ(step.val_top1.has_value(), ends_epoch) << step.step;
    if (!ends_epoch) continue;
    const double hits = *step.val_top1 * kHeldOut;
    EXPECT_NEAR(hits, std::round(hits), 1e-9) << "a share of " << kHeldOut;
    EXPECT_EQ(step.val_top5, 1.0) << "there are three classes";
  }
  EXPECT_EQ(result.summary.final_val_top1, recorder_.steps.back().val_top1);
}

/// The last step has 4 images in 2 micro-batches, all others 6 in 3.
TEST_F(ImageRuns, MeasureWhatAFullStepSendsThoughTheLastIsShort) {
  config_.train.epochs = 1;
  config_.train.micro_batch = 1;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  const RunCost cost = train_on(2).summary.cost;
  EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes);
}

/// What is checked before ranks are started is what they then read.
TEST_F(ImageRuns, BeginWithWeightsOfARunWithTheSameNormAlone) {
  config_.train.epochs = 1;
  const auto fits = [&] {
    checkpoint::check_fit(*checkpoint::open_source(config_.model.weights), plan::describe(config_.model, 1));
  };
  for (const plan::ImageNorm norm : {plan::ImageNorm::kBatch, plan::ImageNorm::kGroup}) {
    const bool batch = norm == plan::ImageNorm::kBatch;
    config_.model.weights.clear();
    config_.model.vision.norm = norm;
    const std::string digest = train_on(1).summary.weights_digest;
    config_.model.weights = (folder_ / (batch ? "batch.safetensors" : "group.safetensors")).string();
    std::filesystem::copy_file(options().weights_path, config_.model.weights);
    EXPECT_NO_THROW(fits());
    config_.optim.lr = 0.0;
    config_.optim.weight_decay = 0.0;
    EXPECT_EQ(train_on(1).summary.weights_digest, digest) << "parameters that do not move";
    config_.optim.lr = 0.05;
    config_.model.vision.norm = batch ? plan::ImageNorm::kGroup : plan::ImageNorm::kBatch;
    test::expect_refusal(fits, {"running_mean", batch ? "set model.norm=batch" : "set model.norm=group"});
  }
}

TEST_F(ImageRuns, LearnWhatTheImagesShow) {
  config_.train.epochs = 20;
  train_on(1);
  EXPECT_GE(*recorder_.steps.back().val_top1, 0.9);
  EXPECT_LT(recorder_.steps.back().loss, 0.5 * recorder_.steps.front().loss);
}

TEST_F(ImageRuns, AreTheSameOnAnyNumberOfRanks) {
  config_.data.pad = 1;
  config_.data.flip = true;
  for (const double mixup : {0.0, 0.4}) {
    config_.data.mixup = mixup;
    config_.model.vision.label_smoothing = mixup > 0.0 ? 0.1 : 0.0;
    train_on(1);
    const std::vector<StepRecord> alone = recorder_.steps;
    for (const auto& [ranks, micro_batch] : {std::pair{1, 2}, {2, 0}, {2, 1}, {3, 2}}) {
      config_.train.micro_batch = micro_batch;
      train_on(ranks);
      ASSERT_EQ(recorder_.steps.size(), alone.size());
      for (size_t i = 0; i < alone.size(); ++i) {
        SCOPED_TRACE(fmt::format("{} ranks, micro-batches of {}, mixup {}, step {}", ranks, micro_batch,
                                 mixup, alone[i].step));
        EXPECT_NEAR(recorder_.steps[i].loss, alone[i].loss, 2e-4 * alone[i].loss);
        EXPECT_NEAR(recorder_.steps[i].grad_norm, alone[i].grad_norm, 5e-3 * alone[i].grad_norm);
        if (!alone[i].val_loss) continue;
        EXPECT_NEAR(*recorder_.steps[i].val_loss, *alone[i].val_loss, 2e-3 * *alone[i].val_loss);
      }
    }
    config_.train.micro_batch = 0;
  }
}

/// Micro-batches that an epoch's last step has no images for leave running statistics alone.
TEST_F(ImageRuns, WithBatchNormCountNoPassWithoutImages) {
  config_.model.vision.norm = plan::ImageNorm::kBatch;
  config_.train.epochs = 2;
  config_.train.global_batch = 16;
  config_.train.micro_batch = 2;
  train_on(1);
  ASSERT_EQ(recorder_.steps.size(), 4u) << "2 epochs of 16 and 6 images";
  const checkpoint::SafetensorsReader file(options().weights_path);
  EXPECT_EQ(file.read("bn1.num_batches_tracked").item<int64_t>(), 2 * (8 + 3));
}

TEST_F(ImageRuns, WithNormsOverRanksAreTheSameWhereARankHasNoImages) {
  config_.model.vision.norm = plan::ImageNorm::kSyncBatch;
  config_.train.epochs = 1;
  config_.train.global_batch = 3;  // the last step of the epoch has one image
  train_on(1);
  const std::vector<StepRecord> alone = recorder_.steps;
  for (const plan::PolicyName policy : {plan::PolicyName::kDdp, plan::PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    train_on(3);
    ASSERT_EQ(recorder_.steps.size(), alone.size());
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_NEAR(recorder_.steps[i].loss, alone[i].loss, 1e-3 * alone[i].loss) << alone[i].step;
      EXPECT_NEAR(recorder_.steps[i].grad_norm, alone[i].grad_norm, 1e-2 * alone[i].grad_norm);
    }
  }
}

TEST_F(ImageRuns, TakeNarrowModels) {
  config_.train.epochs = 1;
  config_.model.vision.norm = plan::ImageNorm::kBatch;
  for (const int64_t width : {4, 6}) {
    config_.model.vision.width = width;
    config_.model = plan::complete(config_.model, 1);
    train_on(1);
    EXPECT_EQ(recorder_.steps.size(), 4u);
  }
}

TEST_F(ImageRuns, TellWhatTheModelMakesOfEachHeldOutImageAtTheEnd) {
  config_.train.epochs = 1;  // so that there are mistakes
  for (const auto& [ranks, micro_batch] : {std::pair{1, 0}, {1, 4}, {2, 0}, {2, 1}, {3, 1}, {3, 2}}) {
    SCOPED_TRACE(fmt::format("{} ranks, micro-batches of {}", ranks, micro_batch));
    config_.train.micro_batch = micro_batch;
    config_.train.rank_batch = 0;
    config_.train.global_batch = micro_batch == 4 ? 4 : 6;
    train_on(ranks);
    ASSERT_EQ(guessed_.size(), 1U) << "at the last of several validations, by rank 0";
    const Classification& all = guessed_.front();
    EXPECT_EQ(all.classes, (std::vector<std::string>{"0", "1", "2"}));
    EXPECT_EQ(all.step, recorder_.steps.back().step);
    EXPECT_EQ(all.images, kHeldOut);
    EXPECT_EQ(static_cast<double>(all.right), *recorder_.steps.back().val_top1 * kHeldOut);
    int64_t diagonal = 0;
    for (size_t truth = 0; truth < kClasses; ++truth) {
      int64_t row = 0;
      for (size_t guess = 0; guess < kClasses; ++guess) row += all.confusion[truth * kClasses + guess];
      EXPECT_EQ(row, truth == 0 ? 4 : 3) << "images of class " << truth;
      diagonal += all.confusion[truth * kClasses + truth];
    }
    EXPECT_EQ(diagonal, all.right);
    EXPECT_EQ(std::ssize(all.worst), kHeldOut - all.right);
    ASSERT_FALSE(all.worst.empty());
    EXPECT_TRUE(std::ranges::is_sorted(all.worst, std::ranges::greater(), &Classification::Mistake::loss));
    for (const Classification::Mistake& one : all.worst) {
      EXPECT_EQ(one.truth, one.sample % kClasses);
      EXPECT_TRUE(one.name.starts_with(fmt::format("image {} of ", one.sample))) << one.name;
      EXPECT_EQ(one.picture.pixels, pixels_of(kHeldOut, one.sample)) << "as it is in the file";
    }
  }
}

TEST_F(ImageRuns, GuessTheSameOnAnyNumberOfRanksUnderEveryPolicy) {
  config_.train.epochs = 1;
  train_on(1);
  const std::string alone = counted(guessed_.at(0));
  const std::vector<Classification::Mistake>& worst = guessed_.at(0).worst;
  for (size_t i = 1; i < worst.size(); ++i)
    ASSERT_GT(worst[i - 1].loss - worst[i].loss, 1e-4) << "the last bits of sums must not decide the order";
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    for (const int64_t ranks : {2, 3}) {
      train_on(ranks);
      EXPECT_EQ(counted(guessed_.at(0)), alone) << ranks << " ranks";
    }
  }
}

TEST_F(ImageRuns, ThatAreStoppedTellNothing) {
  train_on(2, 5);
  EXPECT_TRUE(guessed_.empty());
}

TEST_F(ImageRuns, HaveTheSameBitsUnderEveryPolicy) {
  std::set<std::string> digests;
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    digests.insert(train_on(2).summary.weights_digest);
  }
  EXPECT_EQ(digests.size(), 1u);
}

TEST_F(ImageRuns, GoOnInTheMiddleOfAnEpoch) {
  config_.checkpoint.every = 3;
  config_.data.pad = 1;
  config_.model.vision.norm = plan::ImageNorm::kBatch;
  const std::string whole = train_on(2).summary.weights_digest;
  const std::vector<StepRecord> steps = recorder_.steps;
  for (const int64_t stop_at : {2, 4, 7}) {
    std::filesystem::remove_all(folder_ / "checkpoints");
    const int64_t stopped = train_on(2, stop_at).summary.steps;
    ASSERT_LT(stopped, std::ssize(steps));
    EXPECT_EQ(train_on(2, 0, /*resume=*/true).summary.weights_digest, whole) << stop_at;
    expect_same_steps(recorder_.steps, {steps.begin() + stopped, steps.end()});
  }
}

TEST_F(ImageRuns, RefuseToGoOnWithStepsOfAnotherSize) {
  config_.train.rank_batch = 3;
  config_.checkpoint.every = 2;
  train_on(2, 2);
  expect_refused("6 samples per step, but this run has 3", 1, /*resume=*/true);
}

TEST_F(ImageRuns, SayWhyNothingIsValidated) {
  std::filesystem::remove(folder_ / "images/t10k-images-idx3-ubyte");
  std::filesystem::remove(folder_ / "images/t10k-labels-idx1-ubyte");
  config_.train.epochs = 1;
  ::testing::internal::CaptureStderr();
  const TrainResult result = run(2);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_FALSE(result.summary.final_val_loss.has_value());
  const std::string said = "validation is off: " + config_.data.path + " has no t10k-images-idx3-ubyte";
  EXPECT_NE(log.find(said), std::string::npos) << log;
  EXPECT_EQ(log.find(said), log.rfind(said)) << "one rank speaks";
}

TEST_F(ImageRuns, AreRefusedWhereTheModelCannotReadTheImages) {
  config_.model.vision.classes = 4;
  expect_refused("3 classes, but model.classes=4");
  config_.model.vision.classes = kClasses;
  config_.model.vision.channels = 3;
  expect_refused("1 x 8 x 8, but model.channels=3");
  config_.model.vision.channels = 1;
  config_.model.vision.image_size = 16;
  expect_refused("set model.image_size=8");
  config_.data.resized_crop = true;
  EXPECT_GT(train_on(1).summary.steps, 0) << "parts of them are resized";
}

TEST_F(ImageRuns, EndTheirWarmUpWithTheirLastEpoch) {
  config_.optim.warmup_steps = 13;
  announce_ = true;
  ::testing::internal::CaptureStderr();
  train_on(2);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("note    optim.warmup_steps=13 is cut to the 12 steps of train.epochs=3"),
            std::string::npos)
      << log;
  ASSERT_EQ(recorder_.steps.size(), 12u);
  EXPECT_DOUBLE_EQ(recorder_.steps.front().lr, config_.optim.lr / 12);
  EXPECT_DOUBLE_EQ(recorder_.steps.back().lr, config_.optim.lr);
}

}  // namespace
}  // namespace trireme::train
