// Runs that train adapters on weights that stay as they are: on every policy and number of ranks, through a
// stop, and what they leave.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/support/saved_tensors.h"
#include "tests/train/resume_fixture.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/policy.h"

namespace trireme::train {
namespace {

class AdapterRun : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_heads = 4;
    config_.model.n_kv_heads = 2;
    config_.model.tie_embeddings = false;
    config_.model = plan::complete(config_.model, 32);
    config_.train.steps = 6;
    config_.train.grad_clip = 0.5;
    config_.checkpoint.every = 0;
    config_.optim.lr = 2e-2;
  }

  void use_adapter(plan::AdapterKind kind = plan::AdapterKind::kLora) {
    config_.model.adapter = {.kind = kind, .rank = 4, .alpha = 8.0};
  }

  void use(const plan::Policy& policy) {
    config_.parallel.policy = policy.name;
    config_.parallel.sharding = policy.sharding;
    config_.parallel.bucket_mib = policy.shard_parameters || policy.hybrid ? 0.0 : 0.01;
  }

  std::filesystem::path weights() const { return folder_ / "weights.safetensors"; }
  std::filesystem::path adapter() const { return folder_ / "adapter"; }

  /// Some weights to stand on.
  std::string pretrain() {
    run(1, false);
    const std::filesystem::path kept = folder_ / "base.safetensors";
    std::filesystem::rename(weights(), kept);
    return kept;
  }
};

TEST_F(AdapterRun, EveryPolicyLeavesTheSameAdaptersAndTheBaseAsItWas) {
  config_.model.weights = pretrain();
  use_adapter();
  const test::SavedTensors base = test::saved_tensors(config_.model.weights);
  std::vector<double> alone;
  for (const int64_t ranks : {1, 2, 4}) {
    std::set<std::string> digests;
    for (const plan::Policy& policy : plan::policies()) {
      if (policy.hybrid && ranks < 4) continue;
      use(policy);
      config_.parallel.dp_replicate = policy.hybrid ? 2 : 1;
      const TrainResult result = run(ranks, false);
      digests.insert(result.summary.weights_digest);
      EXPECT_EQ(result.summary.cost.measured_wire_bytes,
                result.summary.cost.predicted_wire_bytes.value_or(-1))
          << policy.label() << " on " << ranks;
      ASSERT_EQ(recorder_.steps.size(), 6u);
      if (alone.empty())
        for (const StepRecord& step : recorder_.steps) alone.push_back(step.loss);
      for (size_t step = 0; step < alone.size(); ++step)
        EXPECT_NEAR(recorder_.steps[step].loss, alone[step], 1e-5 * alone[step])
            << policy.label() << " on " << ranks;
      const test::SavedTensors merged = test::saved_tensors(weights());
      ASSERT_EQ(merged.size(), base.size());
      for (const auto& [name, value] : base) {
        const bool adapted = name.find("_proj.") != std::string::npos;
        EXPECT_EQ(at::equal(merged.at(name), value), !adapted)
            << name << ", " << policy.label() << " on " << ranks;
      }
    }
    EXPECT_EQ(digests.size(), 1u) << ranks << " ranks";
  }
  EXPECT_LT(alone.back(), alone.front());
}

TEST_F(AdapterRun, RecomputationAndPolicyChangeNoBitsInAnyPrecision) {
  use_adapter();
  config_.train.micro_batch = 2;
  struct Precision {
    plan::Dtype compute;
    plan::Fp8 fp8;
  };
  for (const Precision& precision :
       {Precision{plan::Dtype::kFp32, plan::Fp8::kOff}, Precision{plan::Dtype::kBf16, plan::Fp8::kOff},
        Precision{plan::Dtype::kBf16, plan::Fp8::kTensorwise}}) {
    config_.precision.compute = precision.compute;
    config_.precision.fp8.recipe = precision.fp8;
    config_.precision.fp8.fallback = plan::Fp8Fallback::kEmulate;
    std::set<std::string> digests;
    for (const plan::Recompute recompute :
         {plan::Recompute::kNone, plan::Recompute::kBlock, plan::Recompute::kAllButAttention}) {
      config_.memory.recompute = recompute;
      for (const char* policy : {"zero1", "fsdp"}) {
        use(plan::find_policy(policy));
        digests.insert(run(2, false).summary.weights_digest);
      }
    }
    EXPECT_EQ(digests.size(), 1u) << plan::name(precision.compute) << " " << plan::name(precision.fp8);
  }
}

/// Threads share one generator, so that of one rank alone can be told (tests/cli has ranks that are
/// processes).
TEST_F(AdapterRun, DropoutIsTheSameUnderEveryPolicyAndWhereBlocksAreComputedAgain) {
  use_adapter();
  config_.train.micro_batch = 2;
  const std::string undropped = run(1, false).summary.weights_digest;
  config_.model.adapter.dropout = 0.2;
  std::set<std::string> digests;
  for (const plan::Recompute recompute :
       {plan::Recompute::kNone, plan::Recompute::kBlock, plan::Recompute::kAllButAttention}) {
    config_.memory.recompute = recompute;
    for (const plan::Policy& policy : plan::policies()) {
      if (policy.hybrid) continue;
      use(policy);
      digests.insert(run(1, false).summary.weights_digest);
    }
  }
  EXPECT_EQ(digests.size(), 1u);
  EXPECT_FALSE(digests.contains(undropped));
  config_.seed += 1;
  EXPECT_FALSE(digests.contains(run(1, false).summary.weights_digest));
}

TEST_F(AdapterRun, GoesOnExactlyWithDropout) {
  config_.model.weights = pretrain();
  use_adapter();
  config_.model.adapter.dropout = 0.2;
  config_.train.steps = 12;
  config_.checkpoint.every = 4;
  expect_exact(1, "dropout of adapters");
}

TEST_F(AdapterRun, SequencesMayBeSplit) {
  use_adapter();
  run(1, false);
  const std::vector<StepRecord> whole = recorder_.steps;
  config_.parallel.cp = 2;
  for (const plan::CpKind kind : {plan::CpKind::kUlysses, plan::CpKind::kRing}) {
    config_.parallel.cp_kind = kind;
    run(2, false);
    ASSERT_EQ(recorder_.steps.size(), whole.size());
    for (size_t step = 0; step < whole.size(); ++step)
      EXPECT_NEAR(recorder_.steps[step].loss, whole[step].loss, 1e-5 * whole[step].loss) << plan::name(kind);
  }
}

/// A rank keeps neither gradients nor masters nor optimizer state of the base.
TEST_F(AdapterRun, TakesLittleMoreThanTheWeights) {
  use_adapter();
  config_.precision.compute = plan::Dtype::kBf16;
  for (const plan::Policy& policy : plan::policies()) {
    if (policy.hybrid) continue;
    use(policy);
    const TrainResult result = run(2, false);
    const plan::ModelFacts facts = plan::describe(config_.model, config_.data.seq_len);
    const int64_t trained = plan::trained_params(facts), frozen = facts.params - trained;
    const int64_t kept = policy.shard_parameters ? frozen : 2 * frozen;  // 2 bytes, over 2 ranks or on each
    const int64_t bytes = result.summary.cost.measured.total();
    EXPECT_EQ(bytes, result.summary.cost.predicted.total()) << policy.label();
    EXPECT_GE(bytes, kept) << policy.label();
    EXPECT_LE(bytes, kept + 24 * trained + 4096) << policy.label();
  }
}

TEST_F(AdapterRun, GoesOnExactlyFromCheckpointsThatHoldAdaptersAlone) {
  config_.model.weights = pretrain();
  use_adapter();
  config_.train.steps = 12;
  config_.checkpoint.every = 4;
  for (const int64_t ranks : {1, 2}) {
    use(plan::find_policy("fsdp"));
    expect_exact(ranks, fmt::format("{} ranks", ranks));
  }
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(checkpoints()))
    if (entry.path().extension() == ".safetensors") bytes += static_cast<int64_t>(entry.file_size());
  const plan::ModelFacts facts = plan::describe(config_.model, config_.data.seq_len);
  EXPECT_LT(bytes, 2 * 4 * facts.params) << "two checkpoints with the base would be more";
}

TEST_F(AdapterRun, GoesOnExactlyInStagesAndFromAModelInOnePiece) {
  config_.model.n_layers = 4;
  config_.model.weights = pretrain();
  use_adapter();
  config_.train.steps = 12;
  config_.train.micro_batch = 2;
  config_.checkpoint.every = 4;
  config_.parallel.pp = 2;
  for (const plan::ScheduleName schedule : {plan::ScheduleName::k1F1B, plan::ScheduleName::kZbV}) {
    config_.pipeline.schedule = schedule;
    expect_exact(2, std::string(plan::name(schedule)));
  }
  const double loss = recorder_.summary.final_loss;
  std::filesystem::remove_all(checkpoints());
  config_.parallel.pp = 1;
  run(1, false, 4);
  config_.parallel.pp = 2;
  EXPECT_NEAR(run(2, true).summary.final_loss, loss, 1e-5 * loss);
}

TEST_F(AdapterRun, RefusesCheckpointsOfAnotherBaseOrOtherAdapters) {
  config_.model.weights = pretrain();
  use_adapter();
  config_.checkpoint.every = 4;
  run(1, false);
  const plan::Config before = config_;
  config_.model.adapter.rank = 5;
  test::expect_refusal([&] { run(1, true); }, {"other values of adapter.rank"});
  config_ = before;
  config_.model.weights.clear();
  test::expect_refusal([&] { run(1, true); }, {"holds adapters of weights with digest", "seed=42"});
}

/// As peft.PeftModel.from_pretrained() reads them; the names are its own.
TEST_F(AdapterRun, LeavesTheAdaptersAsPeftHasThem) {
  config_.model.weights = pretrain();
  use_adapter();
  config_.model.adapter.targets = "q_proj,down_proj";
  run(2, false);
  const test::SavedTensors adapters = test::saved_tensors(adapter() / "adapter_model.safetensors");
  const test::SavedTensors base = test::saved_tensors(config_.model.weights),
                           merged = test::saved_tensors(weights());
  ASSERT_EQ(adapters.size(), 8u);  // 2 blocks x 2 layers x A and B
  for (const char* module : {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"}) {
    const std::string name = std::string("base_model.model.") + module;
    const at::Tensor a = adapters.at(name + ".lora_A.weight"), b = adapters.at(name + ".lora_B.weight");
    EXPECT_GT(b.abs().max().item<double>(), 0.0);
    const std::string weight = std::string(module) + ".weight";
    EXPECT_TRUE(at::allclose(merged.at(weight), base.at(weight) + 2.0 * at::matmul(b, a), 1e-6, 1e-7))
        << module;
  }
  const auto config = nlohmann::json::parse(read_file((adapter() / "adapter_config.json").string()));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["r"], 4);
  EXPECT_EQ(config["lora_alpha"], 8.0);
  EXPECT_EQ(config["target_modules"], nlohmann::json({"q_proj", "down_proj"}));
  EXPECT_EQ(config["fan_in_fan_out"], false);
}

TEST_F(AdapterRun, BeginsWithAdaptersOnTheBaseThatTheyWereTrainedOnAlone) {
  const std::string base = pretrain();
  config_.model.weights = base;
  use_adapter();
  config_.train.val_every = 6;
  const double validated = run(1, false).summary.final_val_loss.value_or(0.0);
  const std::filesystem::path kept = folder_ / "kept", merged = folder_ / "merged.safetensors";
  std::filesystem::rename(adapter(), kept);
  std::filesystem::rename(weights(), merged);
  config_.model.adapter.weights = kept;
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  for (const char* policy : {"fsdp", "zero2"}) {
    use(plan::find_policy(policy));
    EXPECT_NEAR(run(2, false).summary.final_val_loss.value_or(0.0), validated, 1e-5 * validated) << policy;
  }
  config_.model.weights = merged;
  test::expect_refusal([&] { run(2, false); },
                       {"were trained on weights with digest", "set it to the weights"});
  config_.model.weights = base;
  config_.model.adapter.targets = "q_proj";
  test::expect_refusal([&] { run(1, false); }, {"lora_A"});
}

/// The merged weights compute the loss that the run validated with.
TEST_F(AdapterRun, MergedWeightsValidateAsTheRunDid) {
  config_.model.weights = pretrain();
  use_adapter();
  config_.model.adapter.dropout = 0.2;  // of training alone
  config_.train.val_every = 6;
  const double validated = run(1, false).summary.final_val_loss.value_or(0.0);
  const std::filesystem::path merged = folder_ / "merged.safetensors";
  std::filesystem::rename(weights(), merged);
  config_.model.adapter = {};
  config_.model.weights = merged;
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  EXPECT_NEAR(run(1, false).summary.final_val_loss.value_or(0.0), validated, 1e-5 * validated);
}

TEST_F(AdapterRun, LengthsAreTrainedAlikeUnderEveryPolicyAndInStages) {
  config_.model.n_layers = 4;
  config_.model.weights = pretrain();
  use_adapter(plan::AdapterKind::kDora);
  config_.train.micro_batch = 2;
  run(1, false);
  const std::vector<StepRecord> alone = recorder_.steps;
  EXPECT_LT(alone.back().loss, alone.front().loss);
  const auto expect_like_alone = [&](const std::string& what) {
    ASSERT_EQ(recorder_.steps.size(), alone.size());
    for (size_t step = 0; step < alone.size(); ++step)
      EXPECT_NEAR(recorder_.steps[step].loss, alone[step].loss, 1e-5 * alone[step].loss) << what;
  };
  std::set<std::string> digests;
  for (const plan::Policy& policy : plan::policies()) {
    if (policy.hybrid) continue;
    use(policy);
    for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
      config_.memory.recompute = recompute;
      digests.insert(run(2, false).summary.weights_digest);
      expect_like_alone(policy.label());
    }
  }
  EXPECT_EQ(digests.size(), 1u);
  config_.memory.recompute = plan::Recompute::kNone;
  config_.parallel.bucket_mib = 0.0;
  config_.parallel.pp = 2;
  for (const plan::ScheduleName schedule : {plan::ScheduleName::k1F1B, plan::ScheduleName::kZbV}) {
    config_.pipeline.schedule = schedule;
    run(2, false);
    expect_like_alone(std::string(plan::name(schedule)));
  }
}

/// Files have lengths, and runs what is added to those of the base.
TEST_F(AdapterRun, LengthsAreSavedAndLoadedAsPeftHasThem) {
  config_.model.weights = pretrain();
  use_adapter(plan::AdapterKind::kDora);
  config_.train.val_every = 6;
  const double validated = run(2, false).summary.final_val_loss.value_or(0.0);
  const std::filesystem::path kept = folder_ / "kept", merged = folder_ / "merged.safetensors";
  std::filesystem::rename(adapter(), kept);
  std::filesystem::rename(weights(), merged);
  const test::SavedTensors adapters = test::saved_tensors(kept / "adapter_model.safetensors"),
                           base = test::saved_tensors(config_.model.weights),
                           whole = test::saved_tensors(merged);
  ASSERT_EQ(adapters.size(), 2u * 7u * 3u);
  for (const char* module : {"model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"}) {
    const std::string name = std::string("base_model.model.") + module,
                      weight = std::string(module) + ".weight";
    const at::Tensor m = adapters.at(name + ".lora_magnitude_vector");
    EXPECT_TRUE(at::allclose(whole.at(weight).norm(2, 1), m, 1e-5, 1e-7)) << module;
    EXPECT_FALSE(at::allclose(base.at(weight).norm(2, 1), m, 1e-4, 1e-6)) << module << " has learned nothing";
    const at::Tensor sum = base.at(weight) + 2.0 * at::matmul(adapters.at(name + ".lora_B.weight"),
                                                              adapters.at(name + ".lora_A.weight"));
    EXPECT_TRUE(at::allclose(whole.at(weight), sum * (m / sum.norm(2, 1)).unsqueeze(1), 1e-5, 1e-6))
        << module;
  }
  EXPECT_EQ(nlohmann::json::parse(read_file((kept / "adapter_config.json").string()))["use_dora"], true);
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  const auto expect_validated = [&](int64_t ranks, const std::string& what) {
    EXPECT_NEAR(run(ranks, false).summary.final_val_loss.value_or(0.0), validated, 1e-5 * validated) << what;
  };
  config_.model.adapter.weights = kept;
  for (const char* policy : {"fsdp", "zero1"}) {
    use(plan::find_policy(policy));
    expect_validated(2, policy);
  }
  use(plan::find_policy("fsdp"));
  config_.train.micro_batch = 2;
  config_.parallel.pp = 2;
  expect_validated(2, "stages");
  config_.parallel.pp = 1;
  config_.model.adapter = {};
  config_.model.weights = merged;
  expect_validated(1, "merged");
}

TEST_F(AdapterRun, GoesOnExactlyWithLengths) {
  config_.model.weights = pretrain();
  use_adapter(plan::AdapterKind::kDora);
  config_.model.adapter.dropout = 0.1;
  config_.train.steps = 12;
  config_.checkpoint.every = 4;
  expect_exact(1, "lengths");
}

}  // namespace
}  // namespace trireme::train
