// Adapters of layers that are cut over ranks along tp: those of one process, with the bytes that are
// predicted.
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "tests/support/saved_tensors.h"
#include "tests/train/tensor_parallel_fixture.h"

namespace trireme::train {
namespace {

using plan::AdapterKind;

class AdaptersOverRanks : public TensorParallel {
 protected:
  void SetUp() override {
    TensorParallel::SetUp();
    config_.model.adapter = {.kind = AdapterKind::kLora, .rank = 4, .alpha = 16.0};
    config_.optim.lr = 2e-2;
    config_.train.val_every = 5;
    config_.train.micro_batch = 2;
  }

  struct Adapted {
    Trained run;
    test::SavedAdapters adapters;
  };

  Adapted adapted_on(int64_t ranks, bool resume = false) {
    Trained run = train_on(ranks, resume);
    return {std::move(run), test::saved_adapters(folder_ / "adapter")};
  }

  void expect_adapted_alike(const Adapted& got, const Adapted& wanted, const std::string& what) {
    expect_alike(got.run, wanted.run, what);
    test::expect_near_adapters(got.adapters, wanted.adapters, 1e-3, what);
  }
};

TEST_F(AdaptersOverRanks, LearnWhatThoseOfOneProcessLearn) {
  struct Mesh {
    int64_t ranks, pp, dp_replicate, tp, cp = 1;
  };
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
      config_.model.adapter.kind = kind;
      on(1, 1, 1);
      const Adapted one = adapted_on(1);
      EXPECT_LT(one.run.losses.back(), one.run.losses.front() - 0.01);
      for (const Mesh& mesh :
           {Mesh{2, 1, 1, 2}, Mesh{4, 1, 1, 4}, Mesh{4, 1, 2, 2}, Mesh{4, 2, 1, 2}, Mesh{4, 1, 1, 2, 2}}) {
        on(mesh.pp, mesh.dp_replicate, mesh.tp, mesh.cp);
        expect_adapted_alike(adapted_on(mesh.ranks), one,
                             fmt::format("{} {} on {} ranks, pp {} tp {} cp {}", config_.model.family, kind,
                                         mesh.ranks, mesh.pp, mesh.tp, mesh.cp));
      }
    }
  }
}

TEST_F(AdaptersOverRanks, OfSomeLayersSendWhatIsPredicted) {
  for (const auto& [llama, targets] : {std::pair{false, "c_attn"},
                                       {false, "c_fc"},
                                       {false, "c_proj"},
                                       {true, "q_proj,v_proj"},
                                       {true, "o_proj"},
                                       {true, "up_proj"},
                                       {true, "down_proj"},
                                       {true, "k_proj,down_proj"}}) {
    if (llama) use_llama();
    config_.model.adapter.targets = targets;
    for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
      config_.model.adapter.kind = kind;
      for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
        config_.memory.recompute = recompute;
        on(1, 1, 1);
        const Adapted one = adapted_on(1);
        for (const int64_t pp : {1, 2}) {
          on(pp, 1, 2);
          expect_adapted_alike(adapted_on(2 * pp), one,
                               fmt::format("{} of {}, recompute {}, pp {}", kind, targets, recompute, pp));
        }
      }
    }
  }
}

TEST_F(AdaptersOverRanks, HaveOneDigestUnderEveryPolicyAndRecomputation) {
  use_llama();
  on(1, 1, 2);
  for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
    config_.model.adapter.kind = kind;
    for (const double dropout : {0.0, 0.3}) {
      config_.model.adapter.dropout = dropout;
      std::set<std::string> digests;
      for (const plan::PolicyName policy :
           {plan::PolicyName::kDdp, plan::PolicyName::kZero2, plan::PolicyName::kFsdp}) {
        for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kBlock}) {
          config_.parallel.policy = policy;
          config_.memory.recompute = recompute;
          const Trained trained = train_on(4);
          digests.insert(trained.digest);
          EXPECT_EQ(trained.sent, trained.predicted)
              << fmt::format("{}, {}, {}, dropout {}", kind, policy, recompute, dropout);
        }
      }
      // Ranks of a test are threads, which draw from one generator.
      EXPECT_EQ(digests.size() == 1, dropout == 0.0) << plan::name(kind);
    }
  }
}

TEST_F(AdaptersOverRanks, ComputeInFewBits) {
  use_llama();
  config_.model.d_model = 64;
  config_.model.d_ff = 128;
  config_.model.n_kv_heads = 4;
  on(1, 1, 1);
  const Adapted exact = adapted_on(1);
  config_.precision.compute = plan::Dtype::kBf16;
  // With scales that are known before, all of a feed-forward that trains nothing is one function.
  for (const auto& [recipe, scales, targets] :
       {std::tuple{plan::Fp8::kOff, plan::Fp8Scales::kDynamic, "all"},
        {plan::Fp8::kTensorwise, plan::Fp8Scales::kDynamic, "all"},
        {plan::Fp8::kTensorwise, plan::Fp8Scales::kDelayed, "q_proj"}}) {
    config_.precision.fp8.recipe = recipe;
    config_.precision.fp8.scales = scales;
    config_.model.adapter.targets = targets;
    config_.precision.fp8.fallback = plan::Fp8Fallback::kEmulate;
    on(1, 1, 1);
    const Trained one = train_on(1);
    on(1, 1, 2);
    const Trained two = train_on(2);
    EXPECT_EQ(two.sent, two.predicted) << plan::name(recipe);
    const bool comparable = std::string(targets) == "all";  // with what has trained all layers
    EXPECT_TRUE(!comparable || weight_distance(two, exact.run) <= 1.5 * weight_distance(one, exact.run))
        << plan::name(recipe);
  }
}

/// Checkpoints know whole adapters.
TEST_F(AdaptersOverRanks, GoOnFromAnyMesh) {
  config_.checkpoint.every = 3;
  config_.train.val_every = 0;
  config_.model.adapter.kind = AdapterKind::kDora;
  on(1, 1, 2);
  const Adapted whole = adapted_on(2);
  for (const int64_t tp : {2, 1, 4}) {
    on(1, 1, tp);
    resume_from_ = checkpoints() + "/step-00000003";
    const Adapted trained = adapted_on(tp, /*resume=*/true);
    resume_from_.clear();
    ASSERT_EQ(trained.run.losses.size(), 2u);
    EXPECT_NEAR(trained.run.losses.back(), whole.run.losses.back(), 1e-5);
    EXPECT_EQ(trained.run.digest == whole.run.digest, tp == 2) << tp;
    std::filesystem::remove_all(checkpoints());
    on(1, 1, 2);
    adapted_on(2);  // its checkpoints again
  }
}

/// PEFT's files have whole adapters, too.
TEST_F(AdaptersOverRanks, BeginWithAdaptersOfAnyMesh) {
  config_.train.val_every = 0;
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    config_.model.adapter.kind = AdapterKind::kDora;
    config_.model.adapter.weights.clear();
    config_.train.steps = 5;
    on(1, 1, 2);
    adapted_on(2);
    const std::filesystem::path kept = folder_ / "kept";
    std::filesystem::remove_all(kept);
    std::filesystem::rename(folder_ / "adapter", kept);
    config_.model.adapter.weights = kept;
    config_.train.steps = 1;
    std::vector<double> losses;
    for (const int64_t tp : {1, 2, 4}) {
      on(1, 1, tp);
      losses.push_back(train_on(tp).losses.front());
      EXPECT_NEAR(losses.back(), losses.front(), 1e-5 * losses.front()) << tp;
    }
  }
}

}  // namespace
}  // namespace trireme::train
