#pragma once
// Runs in stages beside those of the model in one piece.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/train/trainer_fixture.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::train {

class StagedTest : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.model.n_layers = 4;
    config_.data.seq_len = 16;
    config_.train = {.steps = 6,
                     .global_batch = 16,
                     .micro_batch = 2,
                     .val_every = 3,
                     .val_batches = 2,
                     .sample_tokens = 8};
    config_.optim.lr = 2e-3;
    config_.model.max_seq_len = 16;
  }

  struct Outcome {
    Recorder recorder;
    std::map<std::string, at::Tensor> weights;
    std::map<std::string, std::string> metadata;
  };

  /// A run on `pp` x `dp` ranks; pp=1 is the model in one piece with as many micro-batches.
  Outcome outcome(int64_t pp, int64_t dp = 1) {
    config_.parallel.pp = pp;
    run(pp * dp);
    const checkpoint::SafetensorsReader reader((folder_ / "weights.safetensors").string());
    Outcome result{recorder_, {}, reader.metadata()};
    for (const auto& [name, info] : reader.tensors()) result.weights[name] = reader.read(name);
    std::filesystem::remove(folder_ / "weights.safetensors");
    return result;
  }

  /// What two ranks did in a step.
  plan::PipelineReport recorded_step() {
    std::optional<plan::PipelineReport> report;
    test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      TrainOptions mine = options();
      mine.show_pipeline = [&](const plan::PipelineReport& made) { report = made; };
      train(mine, world);
    });
    return report.value();
  }

  /// State and wire bytes of short runs on 2 x 2 ranks are those of the stage's program.
  void expect_counted(const std::vector<plan::ScheduleName>& schedules) {
    using plan::PolicyName;
    config_.train.steps = 3;
    config_.train.val_batches = 0;
    config_.train.sample_tokens = 0;
    for (const plan::ScheduleName schedule : schedules) {
      for (const PolicyName policy : {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kFsdp}) {
        for (const plan::Dtype compute : {plan::Dtype::kFp32, plan::Dtype::kBf16}) {
          config_.pipeline.schedule = schedule;
          config_.parallel.policy = policy;
          config_.precision.compute = compute;
          const RunCost cost = outcome(2, 2).recorder.summary.cost;
          const std::string what = fmt::format("{}, {}, {}", schedule, policy, compute);
          EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes) << what;
          EXPECT_EQ(cost.measured.parameters, cost.predicted.parameters) << what;
          EXPECT_EQ(cost.measured.gradients, cost.predicted.gradients) << what;
          EXPECT_EQ(cost.measured.optimizer, cost.predicted.optimizer) << what;
        }
      }
    }
  }

  void expect_near(const Outcome& got, const Outcome& wanted, const std::string& what) const {
    ASSERT_EQ(got.recorder.steps.size(), wanted.recorder.steps.size()) << what;
    for (size_t i = 0; i < wanted.recorder.steps.size(); ++i) {
      const StepRecord &a = got.recorder.steps[i], &b = wanted.recorder.steps[i];
      EXPECT_NEAR(a.loss, b.loss, 1e-6 * b.loss) << what << ", step " << b.step;
      EXPECT_NEAR(a.grad_norm, b.grad_norm, 4e-6 * b.grad_norm) << what << ", step " << b.step;
      EXPECT_EQ(a.tokens, b.tokens) << what;
      ASSERT_EQ(a.val_loss.has_value(), b.val_loss.has_value()) << what;
      if (!b.val_loss) continue;
      EXPECT_NEAR(*a.val_loss, *b.val_loss, 1e-6 * *b.val_loss) << what;
    }
    EXPECT_EQ(got.metadata, wanted.metadata) << what;
    ASSERT_EQ(got.weights.size(), wanted.weights.size()) << what;
    double difference = 0.0, size = 0.0;
    for (const auto& [name, weight] : wanted.weights) {
      ASSERT_TRUE(got.weights.contains(name)) << what << ": " << name;
      difference += (got.weights.at(name) - weight).to(at::kDouble).square().sum().item<double>();
      size += weight.to(at::kDouble).square().sum().item<double>();
    }
    // Where gradients are near 0, AdamW with its default eps divides rounding by rounding.
    const bool divides = config_.optim.name == plan::OptimizerName::kAdamW;
    EXPECT_LE(std::sqrt(difference / size), divides ? 1e-4 : 1e-5) << what;
  }
};

}  // namespace trireme::train
