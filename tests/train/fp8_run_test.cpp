// Training in FP8, emulated on CPUs: every policy learns the same weights, pipelines what the model in one
// piece learns, and a device or a shape without FP8 ends the run or is trained on in bf16, as the config
// says.
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/train/trainer_fixture.h"

namespace trireme::train {
namespace {

class Fp8Run : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_layers = 3;
    config_.model.d_model = 128;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.model.d_ff = 256;
    config_.train = {.steps = 3, .global_batch = 16, .micro_batch = 4, .val_every = 3, .val_batches = 1};
    config_.optim.lr = 2e-3;
    config_.precision.compute = plan::Dtype::kBf16;
    fp8().fallback = plan::Fp8Fallback::kEmulate;
  }

  plan::Fp8Config& fp8() { return config_.precision.fp8; }

  std::string digest(plan::Fp8 recipe, int64_t ranks = 2) {
    fp8().recipe = recipe;
    run(ranks);
    return recorder_.summary.weights_digest;
  }
  double last_loss() const { return recorder_.steps.back().loss; }
};

constexpr plan::Fp8 kRecipes[] = {plan::Fp8::kTensorwise, plan::Fp8::kRowwise, plan::Fp8::kBlockwise};

TEST_F(Fp8Run, EveryPolicyLearnsTheSameWeightsHoweverItRecomputes) {
  for (const plan::Fp8 recipe : kRecipes) {
    std::set<std::string> digests;
    fp8().head = recipe != plan::Fp8::kRowwise;
    for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
      config_.parallel.policy = policy;
      digests.insert(digest(recipe));
    }
    for (const plan::Recompute recompute : plan::all_values<plan::Recompute>()) {
      config_.memory.recompute = recompute;
      digests.insert(digest(recipe));
    }
    config_.memory.recompute = plan::Recompute::kNone;
    EXPECT_EQ(digests.size(), 1u) << plan::name(recipe);
    EXPECT_FALSE(digests.contains(digest(plan::Fp8::kOff))) << plan::name(recipe);
  }
}

TEST_F(Fp8Run, DelayedScalesAreTheSameUnderEveryPolicyAndOnEveryStage) {
  fp8().scales = plan::Fp8Scales::kDelayed;
  fp8().history = 2;
  std::set<std::string> digests;
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    digests.insert(digest(plan::Fp8::kTensorwise));
  }
  for (const plan::Recompute recompute : plan::all_values<plan::Recompute>()) {
    config_.memory.recompute = recompute;
    digests.insert(digest(plan::Fp8::kTensorwise));
  }
  config_.memory.recompute = plan::Recompute::kNone;
  EXPECT_EQ(digests.size(), 1u);
  const double loss = last_loss();
  fp8().scales = plan::Fp8Scales::kDynamic;
  EXPECT_FALSE(digests.contains(digest(plan::Fp8::kTensorwise)));
  EXPECT_NEAR(last_loss(), loss, 0.05);

  // A model in one piece and in two see the same of each block.
  config_.train.micro_batch = 16;
  for (const plan::Fp8Scales scales : plan::all_values<plan::Fp8Scales>()) {
    fp8().scales = scales;
    config_.parallel.pp = 1;
    digest(plan::Fp8::kTensorwise, 1);
    const std::vector<StepRecord> whole = recorder_.steps;
    config_.parallel.pp = 2;
    digest(plan::Fp8::kTensorwise, 2);
    for (size_t step = 0; step < whole.size(); ++step)
      EXPECT_EQ(recorder_.steps[step].loss, whole[step].loss) << plan::name(scales) << " " << step;
  }
}

TEST_F(Fp8Run, MatricesGatheredInFp8GiveTheSameWeightsForFewerBytes) {
  using Change = std::function<void()>;
  const std::vector<std::pair<const char*, Change>> kinds = {
      {"fsdp", [] {}},
      {"kept after forward",
       [this] {
         config_.parallel.reshard_after_forward = {plan::ReshardAfterForward::Kind::kOver, 2};
       }},
      {"hybrid", [this] { config_.parallel.dp_replicate = 2; }},
      {"a reduction each", [this] { config_.parallel.reduce_when = plan::ReduceWhen::kEveryMicroBatch; }},
      {"gpt2", [this] { config_.model.family = plan::ModelFamily::kGpt2; }},
      {"a block in bf16", [this] { fp8().skip.blocks = {1}; }}};
  config_.train.micro_batch = 2;
  config_.train.val_every = 0;
  const plan::Config given = config_;
  for (const plan::Fp8Scales scales : plan::all_values<plan::Fp8Scales>()) {
    for (const auto& [what, change] : kinds) {
      config_ = given;
      fp8().scales = scales;
      change();
      std::set<std::string> digests;
      std::vector<RunCost> costs;
      for (const bool gather : {true, false}) {
        fp8().gather = gather;
        digests.insert(digest(plan::Fp8::kTensorwise, 4));
        costs.push_back(recorder_.summary.cost);
        EXPECT_EQ(costs.back().measured_wire_bytes, costs.back().predicted_wire_bytes) << what << gather;
        EXPECT_EQ(costs.back().measured.parameters, costs.back().predicted.parameters) << what << gather;
      }
      EXPECT_EQ(digests.size(), 1u) << what << " " << plan::name(scales);
      EXPECT_LT(costs[0].measured_wire_bytes, costs[1].measured_wire_bytes) << what;
      EXPECT_LT(costs[0].measured.parameters, costs[1].measured.parameters) << what;
    }
  }
}

TEST_F(Fp8Run, LearnsAboutAsFastAsBf16) {
  config_.train.steps = 40;
  config_.train.global_batch = 8;
  digest(plan::Fp8::kOff, 1);
  const double bf16 = last_loss(), at_first = recorder_.steps.front().loss;
  EXPECT_LT(bf16, at_first - 2.0);
  for (const plan::Fp8 recipe : kRecipes) {
    fp8().head = recipe == plan::Fp8::kBlockwise;
    digest(recipe, 1);
    EXPECT_NEAR(last_loss(), bf16, 0.1) << plan::name(recipe);
  }
  fp8().head = true;
  fp8().scales = plan::Fp8Scales::kDelayed;
  digest(plan::Fp8::kTensorwise, 1);
  EXPECT_NEAR(last_loss(), bf16, 0.1) << "delayed";
}

TEST_F(Fp8Run, BlocksThatAreLeftOutAreThoseOfTheWholeModelOnEveryStage) {
  config_.train.steps = 1;
  std::set<double> losses;
  for (const char* skip : {"none", "first", "last", "first,1,last"}) {
    fp8().skip = *plan::parse_skip(skip);
    config_.parallel.pp = 1;
    digest(plan::Fp8::kTensorwise, 1);
    const double whole = recorder_.steps.front().loss;
    config_.parallel.pp = 2;
    digest(plan::Fp8::kTensorwise, 2);
    EXPECT_EQ(recorder_.steps.front().loss, whole) << skip;
    losses.insert(whole);
  }
  EXPECT_EQ(losses.size(), 4u);
  digest(plan::Fp8::kOff, 2);
  EXPECT_TRUE(losses.contains(recorder_.steps.front().loss)) << "no block is left";
}

TEST_F(Fp8Run, WithoutTheHardwareItEndsOrGoesOnInBf16) {
  const std::string bf16 = digest(plan::Fp8::kOff);
  fp8().fallback = plan::Fp8Fallback::kBf16;
  for (const plan::Fp8 recipe : kRecipes) EXPECT_EQ(digest(recipe), bf16);
  fp8().fallback = plan::Fp8Fallback::kAbort;
  for (const plan::Fp8 recipe : kRecipes) {
    test::expect_refusal([&] { digest(recipe, 1); },
                         {"FP8 matrix multiplication needs a GPU", "precision.fp8_fallback to bf16"});
  }
}

TEST_F(Fp8Run, ShapesThatDoNotFitEndItOrGoOnInBf16) {
  config_.train.micro_batch = 2;  // of 32 tokens: no multiple of 128
  const std::string bf16 = digest(plan::Fp8::kOff);
  EXPECT_NE(digest(plan::Fp8::kTensorwise), bf16);
  test::expect_refusal([&] { digest(plan::Fp8::kBlockwise, 1); },
                       {"2 x 32 = 64 tokens", "multiple of 128", "change train.micro_batch or data.seq_len"});
  fp8().fallback = plan::Fp8Fallback::kBf16;
  EXPECT_EQ(digest(plan::Fp8::kBlockwise), bf16);
}

}  // namespace
}  // namespace trireme::train
