// Adapters of a model in stages: the adapters, the files and the figures of the model in one piece.
#include <filesystem>
#include <set>

#include "tests/support/refusal.h"
#include "tests/support/saved_tensors.h"
#include "tests/train/staged_fixture.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/policy.h"

namespace trireme::train {
namespace {

using plan::PolicyName;
using plan::ScheduleName;

class AdaptersInStages : public StagedTest {
 protected:
  void SetUp() override {
    StagedTest::SetUp();
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_kv_heads = 2;
    config_.model.tie_embeddings = false;
    config_.optim.lr = 2e-2;
    config_.model.adapter = {.kind = plan::AdapterKind::kLora, .rank = 4, .alpha = 8.0};
  }

  struct Adapted {
    Outcome run;
    test::SavedAdapters adapters;
  };

  Adapted adapted(int64_t pp, int64_t dp = 1) {
    Outcome run = outcome(pp, dp);
    Adapted found{std::move(run), test::saved_adapters(folder_ / "adapter")};
    std::filesystem::remove_all(folder_ / "adapter");
    return found;
  }

  void expect_equal_runs(const Adapted& got, const Adapted& wanted, const std::string& what) const {
    expect_near(got.run, wanted.run, what);
    test::expect_near_adapters(got.adapters, wanted.adapters, 1e-4, what);
  }
};

TEST_F(AdaptersInStages, LearnWhatThoseOfTheModelInOnePieceLearn) {
  for (const bool tied : {false, true}) {
    config_.model.tie_embeddings = tied;
    const Adapted whole = adapted(1);
    EXPECT_LT(whole.run.recorder.steps.back().loss, whole.run.recorder.steps.front().loss);
    for (const ScheduleName schedule : {ScheduleName::kGpipe, ScheduleName::k1F1B, ScheduleName::kZbH1,
                                        ScheduleName::kInterleaved1F1B, ScheduleName::kZbV}) {
      for (const bool spread : {false, true}) {
        config_.pipeline.schedule = schedule;
        config_.pipeline.spread_head = spread;
        expect_equal_runs(adapted(2), whole, fmt::format("{}, {}, {}", schedule, tied, spread));
      }
    }
    config_.pipeline = {};
  }
}

TEST_F(AdaptersInStages, HaveOneDigestUnderEveryPolicyInsideStages) {
  const Adapted whole = adapted(1, 2);
  for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbV, ScheduleName::kDualPipe}) {
    config_.pipeline.schedule = schedule;
    std::set<std::string> digests;
    for (const plan::Policy& policy : plan::policies()) {
      if (policy.hybrid) continue;
      config_.parallel.policy = policy.name;
      config_.parallel.sharding = policy.sharding;
      const Adapted staged = adapted(2, 2);
      expect_equal_runs(staged, whole, fmt::format("{}, {}", schedule, policy.label()));
      digests.insert(staged.run.recorder.summary.weights_digest);
    }
    EXPECT_EQ(digests.size(), 1u) << plan::name(schedule);
  }
}

TEST_F(AdaptersInStages, MayLeaveAStageWithNothingToTrain) {
  config_.model.n_layers = 1;
  config_.pipeline.split = *plan::parse_cut("1,0");  // a head alone
  config_.parallel.policy = PolicyName::kFsdp;
  const Adapted whole = adapted(1, 2);
  for (const ScheduleName schedule : {ScheduleName::k1F1B, ScheduleName::kZbH1}) {
    config_.pipeline.schedule = schedule;
    expect_equal_runs(adapted(2, 2), whole, std::string(plan::name(schedule)));
  }
}

TEST_F(AdaptersInStages, TakeTheBytesThatAreCounted) {
  expect_counted({ScheduleName::k1F1B, ScheduleName::kZbV});
}

/// The base that adapters stand on is that of any number of stages, and other adapters are refused as a
/// whole, not by the stage that lacks some.
TEST_F(AdaptersInStages, BeginWithAdaptersOfTheModelInOnePiece) {
  config_.train.val_every = config_.train.steps;
  const double validated = *outcome(1).recorder.steps.back().val_loss;
  const std::filesystem::path kept = folder_ / "kept";
  std::filesystem::rename(folder_ / "adapter", kept);
  config_.model.adapter.weights = kept;
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  config_.pipeline.schedule = ScheduleName::kZbV;
  EXPECT_NEAR(*outcome(2).recorder.steps.back().val_loss, validated, 1e-6 * validated);
  config_.model.adapter.targets = "q_proj";
  test::expect_refusal([&] { outcome(2); }, {"adapter_model.safetensors", "up_proj.lora_A"});
  config_.model.adapter.targets = "all";
  config_.seed += 1;
  test::expect_refusal([&] { outcome(2); }, {"were trained on weights with digest"});
}

/// Validation is without dropout, and the stages draw in the order of their passes.
TEST_F(AdaptersInStages, DropInTrainingAlone) {
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  config_.train.steps = 1;
  config_.train.val_every = 1;
  const double whole = *adapted(1).run.recorder.steps.back().val_loss;
  config_.model.adapter.dropout = 0.3;
  EXPECT_NEAR(*adapted(2).run.recorder.steps.back().val_loss, whole, 1e-6 * whole);
}

}  // namespace
}  // namespace trireme::train
