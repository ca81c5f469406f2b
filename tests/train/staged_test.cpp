// Training in stages: a pipeline sees the same samples, learns the same weights and writes the same files as
// the model in one piece.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "tests/support/refusal.h"
#include "tests/train/staged_fixture.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/pipeline.h"

namespace trireme::train {
namespace {

using plan::PolicyName;
using plan::ScheduleName;

TEST_F(StagedTest, LearnsWhatTheModelInOnePieceLearns) {
  for (const bool tied : {true, false}) {
    config_.model.tie_embeddings = tied;
    const Outcome whole = outcome(1);
    for (const int64_t pp : {2, 4}) {
      const Outcome staged = outcome(pp);
      const std::string what = fmt::format("pp={}{}", pp, tied ? ", tied" : "");
      expect_near(staged, whole, what);
      EXPECT_EQ(staged.recorder.summary.sample, whole.recorder.summary.sample) << what;
      EXPECT_EQ(staged.recorder.summary.peak_bytes_by_pp_rank.size(), static_cast<size_t>(pp));
    }
  }
  expect_near(outcome(4, 2), outcome(1, 2), "pp=4 with two data-parallel ranks");
}

TEST_F(StagedTest, LearnsWhatTheModelInOnePieceLearnsWithSgd) {
  config_.train.sample_tokens = 0;
  config_.optim = {.name = plan::OptimizerName::kSgd, .lr = 0.05};
  const Outcome whole = outcome(1);
  for (const int64_t pp : {2, 4}) expect_near(outcome(pp), whole, fmt::format("pp={}", pp));
}

TEST_F(StagedTest, LearnsTheSameWithEveryPolicyInsideStages) {
  config_.train.sample_tokens = 0;
  for (const PolicyName policy :
       {PolicyName::kDdp, PolicyName::kZero1, PolicyName::kZero2, PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    const Outcome whole = outcome(1, 2);
    expect_near(outcome(2, 2), whole, std::string(plan::name(policy)));
  }
}

TEST_F(StagedTest, SchedulesOfOneOrderEndWithTheSameBits) {
  config_.train.sample_tokens = 0;
  const Outcome first = outcome(2);
  for (const ScheduleName schedule : plan::all_values<ScheduleName>()) {
    config_.pipeline.schedule = schedule;
    const Outcome other = outcome(2);
    const std::string what(plan::name(schedule));
    expect_near(other, first, what);
    if (schedule == ScheduleName::kLoopedBfs || schedule == ScheduleName::kDualPipe) continue;
    EXPECT_EQ(other.recorder.summary.weights_digest, first.recorder.summary.weights_digest) << what;
  }
}

TEST_F(StagedTest, LearnsTheSameInBf16RecomputedAndWithAScaledLoss) {
  config_.train.sample_tokens = 0;
  config_.memory.recompute = plan::Recompute::kBlock;
  const Outcome plain = outcome(2);
  config_.memory.recompute = plan::Recompute::kNone;
  EXPECT_EQ(outcome(2).recorder.summary.weights_digest, plain.recorder.summary.weights_digest);
  config_.precision.scaling = plan::LossScaling::kDynamic;
  EXPECT_EQ(outcome(2).recorder.summary.weights_digest, plain.recorder.summary.weights_digest);
  config_.precision.scaling = plan::LossScaling::kAuto;
  config_.precision.compute = plan::Dtype::kBf16;
  const Outcome whole = outcome(1);
  const Outcome staged = outcome(2);
  const double loss = whole.recorder.steps.back().loss;
  EXPECT_NEAR(staged.recorder.steps.back().loss, loss, 1e-3 * loss) << "tied embeddings are summed in fp32";
  EXPECT_LT(staged.recorder.steps.back().loss, staged.recorder.steps.front().loss);
}

TEST_F(StagedTest, RecordsTheStepBeforeThoseThatAreTraced) {
  config_.parallel.pp = 2;
  config_.train.profile_steps = 2;
  config_.train.sample_tokens = 0;
  std::optional<plan::PipelineReport> report;
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    TrainOptions mine = options();
    mine.show_pipeline = [&](const plan::PipelineReport& made) {
      EXPECT_EQ(world->rank(), 0);
      EXPECT_FALSE(report) << "one step is recorded";
      EXPECT_EQ(recorder_.steps.back().step, 4) << "the step before 5 and 6";
      report = made;
    };
    train(mine, world);
  });
  ASSERT_TRUE(report);
  ASSERT_EQ(report->measured.ranks.size(), 2u);
  const int64_t message = 2 * config_.data.seq_len * config_.model.d_model * 4;
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto passes = std::ranges::count_if(report->events[rank], &plan::StageEvent::is_pass);
    EXPECT_EQ(passes, 2 * 8) << "forward and backward of 8 micro-batches";
    EXPECT_EQ(report->measured.ranks[rank].sent_bytes, 8.0 * static_cast<double>(message));
  }
}

/// By torch's allocator, and by the store of gradients of weights that were put off. Logits are not there
/// when gradients are.
TEST_F(StagedTest, HoldsBetweenPassesWhatTheProgramOfTheStageSays) {
  config_.model.d_model = 64;
  config_.data.seq_len = config_.model.max_seq_len = 64;
  config_.train.steps = 3;
  config_.train.profile_steps = 1;
  config_.train.sample_tokens = config_.train.val_batches = 0;
  config_.parallel.pp = 2;
  for (const plan::ModelFamily family : plan::language_families()) {
    for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbH1, ScheduleName::kZbV}) {
      config_.precision.compute = schedule == ScheduleName::kZbH1 ? plan::Dtype::kBf16 : plan::Dtype::kFp32;
      for (const plan::Recompute recompute :
           {plan::Recompute::kNone, plan::Recompute::kCheap, plan::Recompute::kBlock}) {
        if (family == plan::ModelFamily::kMlp && recompute == plan::Recompute::kCheap) continue;
        config_.model.family = family;
        config_.pipeline.schedule = schedule;
        config_.memory.recompute = recompute;
        const plan::PipelineReport report = recorded_step();
        const auto planned = plan::bytes_by_pp_rank(config_, 2, plan::Device::kCpu);
        for (size_t rank = 0; rank < 2; ++rank) {
          const std::string what = fmt::format("{}, {}, {}, rank {}", family, schedule, recompute, rank);
          const double measured = report.measured.ranks[rank].peak_bytes;
          const auto activations = static_cast<double>(planned[rank].activations),
                     logits = static_cast<double>(planned[rank].logits);
          EXPECT_GE(measured, 0.95 * activations) << what;
          EXPECT_LE(measured, 1.05 * (activations + logits)) << what;
          EXPECT_EQ(logits > 0.0, rank == (schedule == ScheduleName::kZbV ? 0u : 1u)) << what;
        }
      }
    }
  }
}

TEST_F(StagedTest, CountsStateAndWireBytesFromTheProgramOfTheStage) {
  expect_counted({ScheduleName::k1F1B, ScheduleName::kInterleaved1F1B, ScheduleName::kZbH1,
                  ScheduleName::kZbV, ScheduleName::kDualPipe});
}

TEST_F(StagedTest, HooksSendTheGradientsOfStages) {
  config_.train.sample_tokens = 0;
  config_.train.steps = 4;
  config_.train.val_batches = 0;
  config_.parallel.policy = PolicyName::kDdp;  // for local SGD
  config_.model.tie_embeddings = false;        // most hooks would compress copies differently
  config_.parallel.hook_start = 2;
  config_.parallel.local_steps = 2;
  for (const plan::CommHook hook : plan::all_values<plan::CommHook>()) {
    config_.parallel.comm_hook = hook;
    const double whole = outcome(1, 2).recorder.steps.back().loss;
    for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbH1}) {
      config_.pipeline.schedule = schedule;
      const double staged = outcome(2, 2).recorder.steps.back().loss;
      EXPECT_NEAR(staged, whole, 1e-2 * whole) << plan::name(hook) << ", " << plan::name(schedule);
    }
  }
}

TEST_F(StagedTest, HybridShardingWorksInsideStages) {
  config_.train.sample_tokens = 0;
  config_.parallel.policy = PolicyName::kFsdp;
  config_.parallel.dp_replicate = 2;
  expect_near(outcome(2, 4), outcome(1, 4), "hybrid");
}

/// Validation is without dropout, so it is the same before the first update.
TEST_F(StagedTest, DropoutIsForTrainingOnly) {
  config_.model.dropout = 0.2;
  config_.optim.lr = 0.0;
  config_.train.steps = 1;
  config_.train.val_every = 1;
  const Outcome whole = outcome(1), staged = outcome(2);
  const double loss = *whole.recorder.steps.back().val_loss;
  EXPECT_NEAR(*staged.recorder.steps.back().val_loss, loss, 1e-6 * loss);
  config_.model.dropout = 0.0;
  const Outcome without = outcome(2);
  EXPECT_EQ(*without.recorder.steps.back().val_loss, *staged.recorder.steps.back().val_loss);
  EXPECT_NE(without.recorder.steps.back().loss, staged.recorder.steps.back().loss);
}

TEST_F(StagedTest, ASignalOnOneRankEndsAllStagesAfterTheStep) {
  class Stopper : public Sink {
   public:
    explicit Stopper(std::atomic<int>& stop) : stop_(stop) {}
    void record(const StepRecord& record) override {
      if (record.step == 2) stop_ = 15;
    }
    void finish(const RunSummary&) override {}

   private:
    std::atomic<int>& stop_;
  };
  Stopper stopper(stop_);
  more_sinks_ = {&stopper};
  stop_rank_ = 1;
  config_.train.steps = 1000;
  const Outcome stopped = outcome(2);
  EXPECT_LE(stopped.recorder.summary.steps, 4);
  EXPECT_EQ(stopped.recorder.summary.stop_signal, 15);
  EXPECT_FALSE(stopped.weights.empty());
}

TEST_F(StagedTest, ANonFiniteGradientNamesTheRankAndTheParameter) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  config_.parallel.pp = 2;
  test::expect_refusal([&] { run(2); }, {"step ", "the gradient of transformer."});
}

TEST_F(StagedTest, AScheduleOfTheUsersOwnRuns) {
  const auto path = folder_ / "mine.csv";
  std::ofstream(path) << plan::to_csv(plan::make_schedule(ScheduleName::kGpipe, {2, 8, 1}));
  const Outcome built_in = outcome(2);
  config_.pipeline.file = path.string();
  EXPECT_EQ(outcome(2).recorder.summary.weights_digest, built_in.recorder.summary.weights_digest);
}

}  // namespace
}  // namespace trireme::train
