// Runs that train adapters on blocks in NF4: they compute what runs on the decoded weights do, under every
// policy, through a stop and in stages.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/support/saved_tensors.h"
#include "tests/train/resume_fixture.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/kernels/nf4.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/policy.h"

namespace trireme::train {
namespace {

/// The values that a weight has in NF4.
at::Tensor through_nf4(const at::Tensor& weight) {
  const at::Tensor values = weight.to(at::kFloat).contiguous().view(-1);
  at::Tensor blocks = at::empty({(values.numel() + kNf4Block - 1) / kNf4Block, kNf4Bytes}, at::kByte);
  kernels::nf4_encode(blocks, values);
  at::Tensor decoded = at::empty_like(values);
  kernels::nf4_decode(decoded, blocks);
  return decoded.view(weight.sizes());
}

class Nf4Run : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_heads = 4;
    config_.model.n_kv_heads = 2;
    config_.model.d_ff = 100;  // of which no matrix is whole blocks
    config_.model.tie_embeddings = false;
    config_.model = plan::complete(config_.model, 32);
    config_.train.steps = 6;
    config_.checkpoint.every = 0;
    config_.optim.lr = 2e-2;
    make_base();
    on(plan::AdapterBase::kNf4);
  }

  /// Trains all weights of the model, for adapters to be trained on.
  void make_base() {
    config_.model.adapter = {};
    config_.model.weights.clear();
    run(1, false);
    base_ = folder_ / "base.safetensors";
    std::filesystem::rename(weights(), base_);
    write_decoded();
  }

  std::filesystem::path weights() const { return folder_ / "weights.safetensors"; }

  /// On the base in NF4, or on the weights that it decodes to.
  void on(plan::AdapterBase base, plan::AdapterKind kind = plan::AdapterKind::kLora) {
    config_.model.adapter = {.kind = kind, .rank = 4, .alpha = 8.0, .base = base};
    config_.model.weights = base == plan::AdapterBase::kNf4 ? base_ : decoded_;
  }

  void use_policy(const plan::Policy& policy) {
    config_.parallel.policy = policy.name;
    config_.parallel.sharding = policy.sharding;
    config_.parallel.bucket_mib = policy.shard_parameters || policy.hybrid ? 0.0 : 0.01;
    config_.parallel.dp_replicate = policy.hybrid ? 2 : 1;
  }

  std::string digest_on(plan::AdapterBase base, int64_t ranks,
                        plan::AdapterKind kind = plan::AdapterKind::kLora) {
    on(base, kind);
    return run(ranks, false).summary.weights_digest;
  }

  std::string base_, decoded_;

 private:
  void write_decoded() {
    decoded_ = folder_ / "decoded.safetensors";
    std::map<std::string, checkpoint::TensorInfo> infos;
    test::SavedTensors all = test::saved_tensors(base_);
    for (auto& [name, value] : all) {
      if (name.find("_proj.") != std::string::npos) value = through_nf4(value);
      infos[name] = {value.scalar_type(), value.sizes().vec()};
    }
    checkpoint::SafetensorsWriter writer(decoded_, infos, {});
    for (const auto& [name, value] : all) writer.write(name, value);
    writer.commit();
  }
};

TEST_F(Nf4Run, EveryPolicyLeavesTheAdaptersOfTheDecodedWeights) {
  for (const plan::Dtype compute : {plan::Dtype::kFp32, plan::Dtype::kBf16}) {
    config_.precision.compute = compute;
    for (const int64_t ranks : {1, 2, 4}) {
      use_policy(plan::find_policy("fsdp"));
      const std::string wanted = digest_on(plan::AdapterBase::kModel, ranks);
      for (const plan::Policy& policy : plan::policies()) {
        if (policy.hybrid && ranks < 4) continue;
        use_policy(policy);
        on(plan::AdapterBase::kNf4);
        const TrainResult result = run(ranks, false);
        EXPECT_EQ(result.summary.weights_digest, wanted) << policy.label() << " on " << ranks;
        EXPECT_EQ(result.summary.cost.measured_wire_bytes,
                  result.summary.cost.predicted_wire_bytes.value_or(-1))
            << policy.label() << " on " << ranks;
        EXPECT_EQ(result.summary.cost.measured.total(), result.summary.cost.predicted.total())
            << policy.label() << " on " << ranks;
        EXPECT_LT(recorder_.steps.back().loss, recorder_.steps.front().loss);
      }
    }
  }
}

TEST_F(Nf4Run, LengthsAndBlocksThatAreComputedAgainAreThoseOfTheDecodedWeights) {
  for (const plan::Recompute recompute :
       {plan::Recompute::kNone, plan::Recompute::kBlock, plan::Recompute::kAllButAttention}) {
    config_.memory.recompute = recompute;
    use_policy(plan::find_policy("fsdp"));
    EXPECT_EQ(digest_on(plan::AdapterBase::kNf4, 2, plan::AdapterKind::kDora),
              digest_on(plan::AdapterBase::kModel, 2, plan::AdapterKind::kDora));
  }
}

TEST_F(Nf4Run, OfGpt2IsTrainedAsTheDecodedInitialWeights) {
  config_.model.family = plan::ModelFamily::kGpt2;
  config_.model.n_kv_heads = 4;
  config_.train.val_every = 6;
  on(plan::AdapterBase::kNf4);
  config_.model.weights.clear();
  std::set<std::string> digests;
  for (const char* policy : {"ddp", "zero1", "zero3", "fsdp"}) {
    use_policy(plan::find_policy(policy));
    digests.insert(run(2, false).summary.weights_digest);
  }
  EXPECT_EQ(digests.size(), 1u);
}

/// What a run leaves are the decoded weights with the adapters added, which compute what the run did.
TEST_F(Nf4Run, LeavesTheDecodedWeightsWithAdaptersAdded) {
  config_.model.adapter.targets = "q_proj,down_proj";
  config_.train.val_every = 6;
  const double validated = run(1, false).summary.final_val_loss.value_or(0.0);
  const test::SavedTensors merged = test::saved_tensors(weights()), decoded = test::saved_tensors(decoded_);
  for (const auto& [name, value] : decoded) {
    const bool adapted =
        name.find("q_proj.") != std::string::npos || name.find("down_proj.") != std::string::npos;
    EXPECT_EQ(at::equal(merged.at(name), value), !adapted) << name;
  }
  const std::filesystem::path kept = folder_ / "merged.safetensors";
  std::filesystem::rename(weights(), kept);
  config_.model.adapter = {};
  config_.model.weights = kept;
  config_.optim.lr = 1e-30;
  config_.optim.warmup_steps = 0;
  EXPECT_NEAR(run(1, false).summary.final_val_loss.value_or(0.0), validated, 1e-5 * validated);
}

TEST_F(Nf4Run, GoesOnExactlyAndNotOnAnotherBase) {
  config_.train.steps = 12;
  config_.checkpoint.every = 4;
  use_policy(plan::find_policy("fsdp"));
  expect_exact(2, "nf4");
  config_.model.adapter.base = plan::AdapterBase::kModel;
  test::expect_refusal([&] { run(2, true); }, {"other values of adapter.base"});
}

/// The base is the same one, however parameters lie in buffers.
TEST_F(Nf4Run, GoesOnFromBucketsInUnitsAndInStages) {
  config_.checkpoint.every = 3;
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.bucket_mib = 0.01;
  run(2, false, 3);
  for (const int64_t pp : {1, 2}) {
    config_.parallel.bucket_mib = 0.0;
    config_.parallel.policy = plan::PolicyName::kFsdp;
    config_.parallel.pp = pp;
    resume_from_ = checkpoints() + "/step-00000003";
    EXPECT_EQ(run(2, true).summary.steps, config_.train.steps) << pp;
  }
}

/// A rank's scales are those of the whole matrices, wherever they are cut.
TEST_F(Nf4Run, RanksAlongTpTrainTheAdaptersOfTheDecodedWeights) {
  config_.model.d_model = config_.model.d_ff = 128;
  config_.train.micro_batch = 2;
  make_base();
  for (const plan::AdapterKind kind : {plan::AdapterKind::kLora, plan::AdapterKind::kDora}) {
    config_.parallel.tp = 1;
    on(plan::AdapterBase::kNf4, kind);
    run(1, false);
    const std::vector<StepRecord> alone = recorder_.steps;
    config_.parallel.tp = 2;
    for (const char* policy : {"ddp", "fsdp"}) {
      use_policy(plan::find_policy(policy));
      for (const int64_t ranks : {2, 4}) {
        EXPECT_EQ(digest_on(plan::AdapterBase::kNf4, ranks, kind),
                  digest_on(plan::AdapterBase::kModel, ranks, kind))
            << policy << " on " << ranks;
        on(plan::AdapterBase::kNf4, kind);
        const TrainResult result = run(ranks, false);
        EXPECT_EQ(result.summary.cost.measured_wire_bytes,
                  result.summary.cost.predicted_wire_bytes.value_or(-1));
        for (size_t step = 0; step < alone.size(); ++step)
          EXPECT_NEAR(recorder_.steps[step].loss, alone[step].loss, 1e-5 * alone[step].loss) << policy;
      }
    }
  }
}

TEST_F(Nf4Run, StagesTrainTheAdaptersOfTheModelInOnePiece) {
  config_.model.n_layers = 4;
  config_.model.weights.clear();
  config_.train.micro_batch = 2;
  run(1, false);
  const std::vector<StepRecord> alone = recorder_.steps;
  config_.parallel.pp = 2;
  for (const plan::ScheduleName schedule : {plan::ScheduleName::k1F1B, plan::ScheduleName::kZbV}) {
    config_.pipeline.schedule = schedule;
    run(2, false);
    ASSERT_EQ(recorder_.steps.size(), alone.size());
    for (size_t step = 0; step < alone.size(); ++step)
      EXPECT_NEAR(recorder_.steps[step].loss, alone[step].loss, 1e-5 * alone[step].loss)
          << plan::name(schedule);
  }
}

}  // namespace
}  // namespace trireme::train
