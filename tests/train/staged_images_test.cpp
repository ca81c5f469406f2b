// Models of images in stages: what they learn, keep and write is what the model in one piece does.
#include "tests/train/staged_images_fixture.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::train {
namespace {

using plan::ImageNorm;
using plan::PolicyName;
using plan::ScheduleName;

TEST_F(StagedImages, LearnWhatTheModelInOnePieceLearns) {
  for (const ImageNorm norm : {ImageNorm::kGroup, ImageNorm::kBatch, ImageNorm::kSyncBatch}) {
    config_.model.vision.norm = norm;
    const Outcome whole = outcome(1), of_two = outcome(1, 2);
    for (const int64_t pp : {2, 4}) {
      SCOPED_TRACE(fmt::format("norm={}, pp={}", norm, pp));
      expect_near(outcome(pp), whole);
    }
    for (const PolicyName policy : {PolicyName::kDdp, PolicyName::kFsdp}) {
      SCOPED_TRACE(fmt::format("norm={}, {} of two ranks inside two stages", norm, policy));
      config_.parallel.policy = policy;
      expect_near(outcome(2, 2), of_two);
    }
    config_.parallel.policy = PolicyName::kDdp;
  }
}

TEST_F(StagedImages, LearnTheSameUnderEverySchedule) {
  const Outcome first = outcome(2);
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    SCOPED_TRACE(plan::name(schedule));
    config_.pipeline.schedule = schedule;
    expect_near(outcome(2), first);
  }
}

TEST_F(StagedImages, LearnTheSameOfOtherNetworksLayoutsAndMixtures) {
  config_.data.mixup = 0.4;
  config_.model.vision.label_smoothing = 0.1;
  config_.model.vision.channels_last = false;
  config_.memory.recompute = plan::Recompute::kBlock;
  config_.model.vision.norm = ImageNorm::kBatch;
  expect_near(outcome(2), outcome(1));
}

/// Micro-batches of a pipeline have one shape, so a step takes the rest of an epoch and the beginning of the
/// next; held-out images are counted once in any case.
TEST_F(StagedImages, StepsRunOnOverEpochs) {
  write_split("train", kTrained);
  config_.train.epochs = 2;
  config_.parallel.pp = 2;
  train_on(2);
  ASSERT_EQ(recorder_.steps.size(), 6u) << "of 8 of 44 images";
  for (const StepRecord& step : recorder_.steps) {
    EXPECT_EQ(step.tokens, step.step * 8);
    if (!step.val_top1) continue;
    const double hits = *step.val_top1 * kHeldOut;
    EXPECT_NEAR(hits, std::round(hits), 1e-9);
  }
  EXPECT_TRUE(recorder_.steps.back().val_top1);
  EXPECT_EQ(guessed_.back().images, kHeldOut);
}

/// With stages or without, a step has the images that it would have had.
TEST_F(StagedImages, GoOnWithTheSameImagesWithoutStages) {
  write_split("train", kTrained);
  config_.train.epochs = 2;
  config_.train.val_every = 0;
  config_.checkpoint.every = 1;
  const std::vector<StepRecord> whole = outcome(2).recorder.steps;
  ASSERT_EQ(whole.size(), 6u);
  std::filesystem::remove_all(folder_ / "checkpoints");
  config_.parallel.pp = 2;
  train_on(2, /*stop_at=*/2);
  size_t next = recorder_.steps.size();
  ASSERT_LT(next, 4u);
  config_.parallel.pp = 1;
  for (const int64_t stop_at : {4, 0}) {
    train_on(1, stop_at, /*resume=*/true);
    for (const StepRecord& step : recorder_.steps) {
      ASSERT_LT(next, whole.size());
      SCOPED_TRACE(fmt::format("step {}", whole[next].step));
      EXPECT_EQ(step.step, whole[next].step);
      EXPECT_EQ(step.tokens, whole[next].tokens);
      EXPECT_EQ(step.lr, whole[next].lr);
      EXPECT_NEAR(step.loss, whole[next].loss, 1e-5 * whole[next].loss);
      ++next;
    }
  }
  EXPECT_EQ(next, whole.size());
}

TEST_F(StagedImages, GoOnAfterStepsWithoutStagesOnlyWhereThoseAreWhole) {
  config_.train.epochs = 2;
  config_.checkpoint.every = 1;
  const std::vector<StepRecord> whole = outcome(1).recorder.steps;
  for (const int64_t images : {int64_t{48}, kTrained}) {
    SCOPED_TRACE(images);
    write_split("train", static_cast<uint32_t>(images));
    std::filesystem::remove_all(folder_ / "checkpoints");
    config_.parallel.pp = 1;
    train_on(1, /*stop_at=*/2);
    const size_t done = recorder_.steps.size();
    config_.parallel.pp = 2;
    if (images != 48) {
      expect_refused("(6 of 8 images)", 2, /*resume=*/true);
      continue;
    }
    train_on(2, 0, /*resume=*/true);
    ASSERT_EQ(recorder_.steps.size(), whole.size() - done);
    for (size_t i = done; i < whole.size(); ++i) {
      EXPECT_EQ(recorder_.steps[i - done].tokens, whole[i].tokens);
      EXPECT_NEAR(recorder_.steps[i - done].loss, whole[i].loss, 1e-5 * whole[i].loss);
    }
  }
}

TEST_F(StagedImages, ResumeWithTheirRunningStatistics) {
  config_.model.vision.norm = ImageNorm::kBatch;
  config_.checkpoint.every = 2;
  const Outcome whole = outcome(2);
  train_on(2, /*stop_at=*/4);
  train_on(2, 0, /*resume=*/true);
  EXPECT_EQ(recorder_.summary.weights_digest, whole.recorder.summary.weights_digest);
  const checkpoint::SafetensorsReader file(options().weights_path);
  for (const auto& [name, tensor] : whole.tensors) EXPECT_TRUE(file.read(name).equal(tensor)) << name;
}

/// By torch's allocator.
TEST_F(StagedImages, HoldBetweenPassesWhatTheProgramOfTheStageSays) {
  config_.model.vision.width = 16;
  config_.model = plan::complete(config_.model, 1);
  config_.train = {.steps = 3, .global_batch = 48, .micro_batch = 12, .profile_steps = 1};
  config_.parallel.pp = 2;
  for (const ImageNorm norm : {ImageNorm::kGroup, ImageNorm::kBatch}) {
    for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
      config_.model.vision.norm = norm;
      config_.memory.recompute = recompute;
      std::optional<plan::PipelineReport> report;
      test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
        TrainOptions mine = options();
        mine.show_pipeline = [&](const plan::PipelineReport& made) { report = made; };
        train(mine, world);
      });
      const auto planned = plan::bytes_by_pp_rank(config_, 2, plan::Device::kCpu);
      for (size_t rank = 0; rank < 2; ++rank) {
        SCOPED_TRACE(fmt::format("norm={}, recompute={}, rank {}", norm, recompute, rank));
        const double measured = report.value().measured.ranks[rank].peak_bytes;
        EXPECT_NEAR(measured / static_cast<double>(planned[rank].activations), 1.0, 0.05);
      }
    }
  }
}

TEST_F(StagedImages, CountStateAndWireBytesFromTheProgramOfTheStage) {
  config_.train.val_batches = 0;
  for (const PolicyName policy : {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    for (const int64_t dp : {1, 2}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks of a stage", policy, dp));
      const RunCost cost = outcome(2, dp).recorder.summary.cost;
      EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes);
      EXPECT_EQ(cost.measured.parameters, cost.predicted.parameters);
      EXPECT_EQ(cost.measured.gradients, cost.predicted.gradients);
      EXPECT_EQ(cost.measured.optimizer, cost.predicted.optimizer);
    }
  }
}

TEST_F(StagedImages, CountWhatNormsOverRanksSend) {
  config_.train.val_batches = 0;
  config_.model.vision.norm = ImageNorm::kSyncBatch;
  for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
    config_.memory.recompute = recompute;
    for (const int64_t stages : {1, 2}) {
      SCOPED_TRACE(fmt::format("{} stages, recompute={}", stages, recompute));
      const RunCost cost = outcome(stages, 2).recorder.summary.cost;
      EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes);
    }
  }
}

}  // namespace
}  // namespace trireme::train
