// Training with a head that is spread over the ranks of a pipeline: the weights, the files and the samples of
// the model in one piece, and no more memory and messages than are counted.
#include <algorithm>
#include <numeric>

#include "tests/support/refusal.h"
#include "tests/train/staged_fixture.h"
#include "trireme/base/error.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/pipeline.h"

namespace trireme::train {
namespace {

using plan::PolicyName;
using plan::ScheduleName;

constexpr ScheduleName kSchedules[] = {ScheduleName::k1F1B, ScheduleName::kGpipe,
                                       ScheduleName::kZbH1, ScheduleName::kInterleaved1F1B,
                                       ScheduleName::kZbV,  ScheduleName::kLoopedBfs};

class SpreadHeadRun : public StagedTest {
 protected:
  void SetUp() override {
    StagedTest::SetUp();
    config_.model.tie_embeddings = false;
    config_.pipeline.spread_head = true;
    config_.model.vocab_size += 3;  // parts of different sizes
  }

  /// With a head of its own weight, and with one that is the embeddings.
  template <typename Body>
  void untied_and_tied(const Body& body) {
    for (const bool tied : {false, true}) {
      SCOPED_TRACE(tied ? "tied" : "untied");
      config_.model.tie_embeddings = tied;
      body();
    }
  }
};

TEST_F(SpreadHeadRun, LearnsWhatTheModelInOnePieceLearns) {
  untied_and_tied([&] {
    const Outcome whole = outcome(1);
    for (const ScheduleName schedule : kSchedules) {
      config_.pipeline.schedule = schedule;
      for (const int64_t pp : {2, 4}) {
        if (pp == 4 && schedule != ScheduleName::k1F1B && schedule != ScheduleName::kZbH1) continue;
        const Outcome spread = outcome(pp);
        const std::string what = fmt::format("{}, pp={}", schedule, pp);
        expect_near(spread, whole, what);
        EXPECT_EQ(spread.recorder.summary.sample, whole.recorder.summary.sample) << what;
      }
    }
  });
}

TEST_F(SpreadHeadRun, LearnsTheSameWithEveryPolicyInsideStages) {
  untied_and_tied([&] {
    config_.train.sample_tokens = 0;
    for (const PolicyName policy :
         {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kZero2, PolicyName::kFsdp}) {
      config_.parallel.policy = policy;
      expect_near(outcome(2, 2), outcome(1, 2), std::string(plan::name(policy)));
    }
  });
}

TEST_F(SpreadHeadRun, SchedulesOfOneOrderEndWithTheSameBits) {
  untied_and_tied([&] {
    config_.train.sample_tokens = 0;
    config_.pipeline.schedule = ScheduleName::k1F1B;
    const Outcome first = outcome(2);
    for (const ScheduleName schedule : kSchedules) {
      config_.pipeline.schedule = schedule;
      if (schedule == ScheduleName::kLoopedBfs) continue;
      EXPECT_EQ(outcome(2).recorder.summary.weights_digest, first.recorder.summary.weights_digest)
          << plan::name(schedule);
    }
  });
}

TEST_F(SpreadHeadRun, LearnsTheSameInBf16RecomputedAndWithAScaledLoss) {
  untied_and_tied([&] {
    config_.train.sample_tokens = 0;
    config_.precision.compute = plan::Dtype::kFp32;
    const Outcome plain = outcome(2);
    config_.memory.recompute = plan::Recompute::kBlock;
    EXPECT_EQ(outcome(2).recorder.summary.weights_digest, plain.recorder.summary.weights_digest);
    config_.memory.recompute = plan::Recompute::kNone;
    config_.precision.scaling = plan::LossScaling::kDynamic;
    EXPECT_EQ(outcome(2).recorder.summary.weights_digest, plain.recorder.summary.weights_digest);
    config_.precision.scaling = plan::LossScaling::kAuto;
    config_.precision.compute = plan::Dtype::kBf16;
    const double whole = outcome(1).recorder.steps.back().loss;
    EXPECT_NEAR(outcome(2).recorder.steps.back().loss, whole, 1e-3 * whole);
  });
}

TEST_F(SpreadHeadRun, CountsStateAndWireBytesFromTheProgramOfTheStage) {
  untied_and_tied([&] { expect_counted({ScheduleName::k1F1B, ScheduleName::kZbV}); });
}

/// By torch's allocator, as in the test of stages with a head of their own.
TEST_F(SpreadHeadRun, HoldsBetweenPassesWhatTheProgramOfTheStageSays) {
  config_.model.d_model = 64;
  config_.data.seq_len = config_.model.max_seq_len = 64;
  config_.train.steps = 3;
  config_.train.profile_steps = 1;
  config_.train.sample_tokens = config_.train.val_batches = 0;
  config_.precision.compute = plan::Dtype::kBf16;
  config_.parallel.pp = 2;
  const auto expect_held = [&](plan::ModelFamily family) {
    for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbH1, ScheduleName::kZbV}) {
      config_.model.family = family;
      config_.pipeline.schedule = schedule;
      const plan::PipelineReport report = recorded_step();
      const auto planned = plan::bytes_by_pp_rank(config_, 2, plan::Device::kCpu);
      for (size_t rank = 0; rank < 2; ++rank) {
        const std::string what = fmt::format("{}, {}, rank {}", family, schedule, rank);
        const double measured = report.measured.ranks[rank].peak_bytes;
        const auto activations = static_cast<double>(planned[rank].activations),
                   logits = static_cast<double>(planned[rank].logits);
        EXPECT_GE(measured, 0.95 * activations) << what;
        EXPECT_LE(measured, 1.05 * (activations + logits)) << what;
        EXPECT_GT(logits, 0.0) << what;
      }
    }
  };
  untied_and_tied([&] {
    for (const plan::ModelFamily family : plan::language_families()) expect_held(family);
  });
}

TEST_F(SpreadHeadRun, TellsWhatAStepDid) {
  config_.train.steps = 3;
  config_.train.profile_steps = 1;
  config_.train.sample_tokens = config_.train.val_batches = 0;
  config_.parallel.pp = 2;
  const plan::PipelineReport report = recorded_step();
  ASSERT_EQ(report.measured.stages.size(), 4u) << "two stages and two parts of the head";
  const double tokens = 2.0 * static_cast<double>(config_.data.seq_len),
               hidden = tokens * static_cast<double>(config_.model.d_model) * 4.0, totals = tokens * 12.0,
               part = 2.0 * hidden + tokens * 16.0;
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto passes = std::ranges::count_if(report.events[rank], &plan::StageEvent::is_pass);
    EXPECT_EQ(passes, 4 * 8) << "forward and backward of a stage and of a part, of 8 micro-batches";
    // One rank sends activations and its part, the other gradients, hidden states and totals.
    const double wanted = rank == 0 ? hidden + part : 2.0 * hidden + totals;
    EXPECT_EQ(report.measured.ranks[rank].sent_bytes, 8.0 * wanted);
    const auto& causes = report.measured.ranks[rank].idle_causes;
    EXPECT_NEAR(std::accumulate(causes.begin(), causes.end(), 0.0), report.measured.ranks[rank].idle, 1e-6);
  }
}

/// Validation is without dropout.
TEST_F(SpreadHeadRun, DropoutIsForTrainingOnly) {
  config_.model.dropout = 0.2;
  config_.optim.lr = 0.0;
  config_.train.steps = 1;
  config_.train.val_every = 1;
  const double loss = *outcome(1).recorder.steps.back().val_loss;
  EXPECT_NEAR(*outcome(2).recorder.steps.back().val_loss, loss, 1e-6 * loss);
}

TEST_F(SpreadHeadRun, ANonFiniteGradientNamesTheRankAndTheParameter) {
  untied_and_tied([&] {
    config_.optim.lr = 1e30;
    config_.train.grad_clip = 0.0;
    config_.parallel.pp = 2;
    test::expect_refusal([&] { run(2); }, {"step ", "the gradient of "});
  });
}

}  // namespace
}  // namespace trireme::train
