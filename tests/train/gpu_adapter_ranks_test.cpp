// Adapters on two GPUs learn what they learn on one: over ranks along tp, cp, pp and under every policy, on
// the model's weights and on NF4. One process a GPU; skipped with fewer than two GPUs.
#include <filesystem>
#include <set>

#include "tests/support/saved_tensors.h"
#include "tests/train/gpu_staged_fixture.h"

namespace trireme::train {
namespace {

using plan::AdapterBase;
using plan::AdapterKind;
using plan::PolicyName;
using plan::Recompute;

class GpuAdapterRanks : public GpuRanksTest {
 protected:
  void SetUp() override {
    set_up_on(2);
    if (IsSkipped()) return;
    config_.model.vocab_size = 259;
    config_.model.d_model = config_.model.d_ff = 128;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.optim.lr = 2e-2;
  }

  struct Mesh {
    std::string what;
    plan::ParallelConfig parallel;
    plan::PipelineConfig pipeline = {};
  };

  static std::vector<Mesh> meshes() {
    std::vector<Mesh> all;
    all.push_back({"tp", {.tp = 2}});
    all.push_back({"cp, all-to-all", {.cp = 2, .cp_kind = plan::CpKind::kUlysses}});
    all.push_back({"cp, ring", {.cp = 2, .cp_kind = plan::CpKind::kRing}});
    all.push_back({"pp, 1f1b", {.pp = 2}, {.schedule = plan::ScheduleName::k1F1B}});
    all.push_back({"pp, zb_v", {.pp = 2}, {.schedule = plan::ScheduleName::kZbV}});
    for (const PolicyName policy : {PolicyName::kDdp, PolicyName::kZero2, PolicyName::kFsdp})
      all.push_back({std::string(plan::name(policy)), {.policy = policy}});
    return all;
  }

  struct Adapted {
    Outcome run;
    test::SavedAdapters adapters;
  };

  Adapted adapted_on(const std::shared_ptr<comm::World>& world, const Mesh& mesh) {
    config_.parallel = mesh.parallel;
    config_.pipeline = mesh.pipeline;
    Outcome run = outcome_on(world);
    if (world->rank() != 0) return {};
    return {std::move(run), test::saved_adapters(folder_ / "adapter")};
  }

  void use(bool llama, AdapterKind kind, AdapterBase base) {
    config_.model.family = llama ? plan::ModelFamily::kLlama : plan::ModelFamily::kGpt2;
    config_.model.n_kv_heads = llama ? 2 : 4;
    config_.model.tie_embeddings = !llama;
    config_.model.adapter = {.kind = kind, .rank = 4, .alpha = 8.0, .base = base};
  }

  void compare(const std::shared_ptr<comm::World>& world) {
    const std::string with = fmt::format("{} {} on {}", config_.model.family, config_.model.adapter.kind,
                                         config_.model.adapter.base);
    Adapted one;
    if (world->rank() == 0) {
      one = adapted_on(test::one_gpu(), {});
      EXPECT_LT(one.run.recorder.steps.back().loss, one.run.recorder.steps.front().loss) << with;
    }
    for (const Mesh& mesh : meshes()) {
      const Adapted two = adapted_on(world, mesh);
      if (world->rank() != 0) continue;
      const std::string what = fmt::format("{}, {}", with, mesh.what);
      expect_near(two.run, one.run, what);
      test::expect_near_adapters(two.adapters, one.adapters, 1e-3, what);
      const RunCost& cost = two.run.recorder.summary.cost;
      EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes) << what;
    }
  }

  int compare_all(int64_t rank) {
    load_kernels_at_once();
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {});
    // Every pair of family, kind and base.
    for (const bool llama : {false, true}) {
      for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
        use(llama, kind, llama == (kind == AdapterKind::kLora) ? AdapterBase::kModel : AdapterBase::kNf4);
        compare(world);
      }
    }
    return HasFailure() ? 1 : 0;
  }

  /// One digest for all policies and ways to compute again, in bf16. `tp`: of ranks along it.
  int count_digests(int64_t rank, int64_t tp) {
    load_kernels_at_once();
    const auto world = test::join_gpus(rank, 2, port_, /*timeout_s=*/60.0, {});
    config_.precision.compute = plan::Dtype::kBf16;
    config_.train.deterministic = true;
    for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
      std::set<std::string> digests_of_all;
      for (const double dropout : {0.0, 0.3}) {
        use(/*llama=*/true, kind, AdapterBase::kModel);
        config_.model.adapter.dropout = dropout;
        std::set<std::string> digests;
        for (const auto& [policy, recompute] : {std::pair{PolicyName::kDdp, Recompute::kNone},
                                                {PolicyName::kZero2, Recompute::kBlock},
                                                {PolicyName::kFsdp, Recompute::kCheap},
                                                {PolicyName::kFsdp, Recompute::kNone}}) {
          if (dropout > 0.0 && recompute == Recompute::kCheap) continue;  // which is refused
          config_.memory.recompute = recompute;
          const Adapted made = adapted_on(world, {"", {.policy = policy, .tp = tp}});
          digests.insert(made.run.recorder.summary.weights_digest);
        }
        EXPECT_EQ(digests.size(), 1u) << plan::name(kind) << " with dropout " << dropout;
        digests_of_all.merge(digests);
      }
      EXPECT_EQ(digests_of_all.size(), rank == 0 ? 2u : 1u) << plan::name(kind);
    }
    return HasFailure() ? 1 : 0;
  }

  void expect_ranks(const std::function<int(int64_t rank)>& body) {
    EXPECT_EQ(test::fork_ranks(2, body, 200.0), (std::vector<int>{0, 0}));
  }
};

/// Tests with two GPUs to themselves: ranks that share one wait for each other most of the time.
using GpuAdapterRanksAlone = GpuAdapterRanks;

TEST_F(GpuAdapterRanksAlone, LearnWhatThoseOnOneGpuLearn) {
  expect_ranks([this](int64_t rank) { return compare_all(rank); });
}

/// Each process draws from a generator of its own, as ranks of a run do.
TEST_F(GpuAdapterRanksAlone, HaveOneDigestUnderEveryPolicyAndRecomputation) {
  expect_ranks([this](int64_t rank) { return count_digests(rank, /*tp=*/1); });
}

TEST_F(GpuAdapterRanksAlone, HaveOneDigestOverRanksAlongTp) {
  expect_ranks([this](int64_t rank) { return count_digests(rank, /*tp=*/2); });
}

}  // namespace
}  // namespace trireme::train
