// Ranks along tp have parts of every layer, and train what one process trains: on every mesh, with every
// policy, schedule and way to recompute.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/support/refusal.h"
#include "tests/train/tensor_parallel_fixture.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::train {
namespace {

constexpr plan::CpKind kCpKinds[] = {plan::CpKind::kUlysses, plan::CpKind::kRing};

TEST_F(TensorParallel, EveryMeshTrainsWhatOneProcessTrains) {
  struct Mesh {
    int64_t ranks, pp, dp_replicate, tp;
  };
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    on(1, 1, 1);
    const Trained one = train_on(1);
    for (const Mesh& mesh : {Mesh{2, 1, 1, 2}, Mesh{4, 1, 1, 4}, Mesh{4, 1, 1, 2}, Mesh{4, 1, 2, 2},
                             Mesh{4, 2, 1, 2}, Mesh{8, 2, 1, 2}, Mesh{8, 2, 1, 4}}) {
      on(mesh.pp, mesh.dp_replicate, mesh.tp);
      expect_alike(
          train_on(mesh.ranks), one,
          fmt::format("{} on {} ranks, pp {} tp {}", config_.model.family, mesh.ranks, mesh.pp, mesh.tp));
    }
  }
}

/// Context parallelism: each rank has some tokens of each sequence, and attention exchanges them, or keys and
/// values go around.
TEST_F(TensorParallel, SequencesMayBeSplit) {
  struct Mesh {
    int64_t ranks, pp, dp_replicate, tp, cp;
  };
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    config_.train.micro_batch = 2;
    on(1, 1, 1);
    const Trained one = train_on(1);
    for (const Mesh& mesh :
         {Mesh{2, 1, 1, 1, 2}, Mesh{4, 1, 1, 1, 4}, Mesh{4, 1, 1, 1, 2}, Mesh{4, 1, 2, 1, 2},
          Mesh{4, 1, 1, 2, 2}, Mesh{4, 2, 1, 1, 2}, Mesh{8, 2, 1, 2, 2}}) {
      on(mesh.pp, mesh.dp_replicate, mesh.tp, mesh.cp);
      for (const plan::CpKind kind : kCpKinds) {
        config_.parallel.cp_kind = kind;
        expect_alike(train_on(mesh.ranks), one,
                     fmt::format("{} on {} ranks, pp {} tp {} cp {}, {}", config_.model.family, mesh.ranks,
                                 mesh.pp, mesh.tp, mesh.cp, kind));
      }
    }
  }
}

/// No heads are shared out, so there may be any number of them.
TEST_F(TensorParallel, RingsTakeHeadsThatRanksCannotShare) {
  config_.model.d_model = 24;
  config_.model.n_heads = config_.model.n_kv_heads = 3;
  config_.train.micro_batch = 2;
  for (const bool llama : {false, true}) {
    if (llama) {
      use_llama();
      config_.model.n_kv_heads = 1;
    }
    on(1, 1, 1);
    const Trained one = train_on(1);
    for (const int64_t cp : {2, 4}) {
      on(1, 1, 1, cp);  // auto
      expect_alike(train_on(cp), one, fmt::format("{}, cp {}", config_.model.family, cp));
    }
  }
}

/// Adam divides rounding by small gradients; without it weights follow as closely as losses.
TEST_F(TensorParallel, SplitSequencesFollowOneProcessCloselyBySgd) {
  use_llama();
  config_.train.micro_batch = 2;
  config_.optim = {.name = plan::OptimizerName::kSgd, .lr = 0.05};
  on(1, 1, 1);
  const Trained one = train_on(1);
  for (const plan::CpKind kind : kCpKinds) {
    config_.parallel.cp_kind = kind;
    for (const int64_t cp : {2, 4}) {
      on(1, 1, 1, cp);
      const Trained split = train_on(cp);
      expect_alike(split, one, fmt::format("cp {}, {}", cp, kind));
      EXPECT_LE(weight_distance(split, one), 1e-5) << cp << " " << plan::name(kind);
    }
  }
}

TEST_F(TensorParallel, SplitSequencesLeaveAllPoliciesAndRecomputationsWithTheSameWeights) {
  use_llama();
  config_.train.micro_batch = 2;
  on(1, 1, 1, 2);
  for (const plan::CpKind kind : kCpKinds) {
    config_.parallel.cp_kind = kind;
    std::set<std::string> digests;
    for (const plan::PolicyName policy :
         {plan::PolicyName::kDdp, plan::PolicyName::kZero2, plan::PolicyName::kFsdp}) {
      for (const plan::Recompute recompute :
           {plan::Recompute::kNone, plan::Recompute::kBlock, plan::Recompute::kAllButAttention}) {
        config_.parallel.policy = policy;
        config_.memory.recompute = recompute;
        const Trained trained = train_on(4);
        digests.insert(trained.digest);
        EXPECT_EQ(trained.sent, trained.predicted)
            << plan::name(policy) << " " << plan::name(recompute) << " " << plan::name(kind);
      }
    }
    EXPECT_EQ(digests.size(), 1u) << plan::name(kind);
  }
}

/// Backward of a block in two halves, and of other orders of micro-batches, passes on the same.
TEST_F(TensorParallel, RingsInStagesEndWithTheSameWeightsUnderAllSchedules) {
  use_llama();
  config_.train.micro_batch = 2;
  config_.model.n_layers = 4;
  config_.parallel.cp_kind = plan::CpKind::kRing;
  on(2, 1, 1, 2);
  std::set<std::string> digests;
  for (const plan::ScheduleName schedule :
       {plan::ScheduleName::kGpipe, plan::ScheduleName::k1F1B, plan::ScheduleName::kZbV}) {
    config_.pipeline.schedule = schedule;
    const Trained trained = train_on(4);
    digests.insert(trained.digest);
    EXPECT_EQ(trained.sent, trained.predicted) << plan::name(schedule);
  }
  EXPECT_EQ(digests.size(), 1u);
}

/// Half a block that is computed again keeps no output of attention: its keys go around once more.
TEST_F(TensorParallel, RingsInHalvesOfBlocksSendWhatIsPredicted) {
  use_llama();
  config_.train.micro_batch = 2;
  config_.model.n_layers = 3;
  config_.parallel.cp_kind = plan::CpKind::kRing;
  config_.pipeline.split.kind = plan::StageCut::Kind::kCost;
  config_.memory.recompute = plan::Recompute::kAllButAttention;
  on(2, 1, 1, 2);
  const Trained trained = train_on(4);
  EXPECT_EQ(trained.sent, trained.predicted);
}

TEST_F(TensorParallel, TiedAndUntiedWordsAreSharedOut) {
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    config_.model.tie_embeddings = llama;  // as neither has it by default
    on(1, 1, 1);
    const Trained one = train_on(1);
    on(1, 1, 4);
    expect_alike(train_on(4), one, "tp 4");
    on(2, 1, 2);
    expect_alike(train_on(4), one, "pp 2 tp 2");
  }
}

/// The law of data-parallel policies, for parts of layers: one digest.
TEST_F(TensorParallel, AllPoliciesEndWithTheSameWeights) {
  use_llama();
  config_.train.micro_batch = 2;
  on(1, 1, 2);
  std::set<std::string> digests;
  for (const plan::PolicyName policy :
       {plan::PolicyName::kDdp, plan::PolicyName::kZero1, plan::PolicyName::kZero2, plan::PolicyName::kZero3,
        plan::PolicyName::kFsdp}) {
    config_.parallel.policy = policy;
    const Trained trained = train_on(4);
    digests.insert(trained.digest);
    EXPECT_EQ(trained.sent, trained.predicted) << plan::name(policy);
  }
  EXPECT_EQ(digests.size(), 1u);
}

/// Products in pieces make what whole ones make, with the same bytes, and one digest for all that changes no
/// bit.
TEST_F(TensorParallel, ProductsInPiecesTrainWhatWholeOnesTrain) {
  config_.train.micro_batch = 2;
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    on(1, 1, 1);
    const Trained one = train_on(1);
    config_.parallel.async_tp = true;
    on(1, 1, 4);
    expect_alike(train_on(4), one, "tp 4");
    on(2, 1, 2);
    expect_alike(train_on(4), one, "pp 2 tp 2");
    on(1, 2, 2);
    expect_alike(train_on(4), one, "cp 2 tp 2");
    on(1, 1, 2);
    std::set<std::string> digests;
    for (const plan::PolicyName policy : {plan::PolicyName::kDdp, plan::PolicyName::kFsdp}) {
      config_.parallel.policy = policy;
      for (const plan::Recompute recompute :
           {plan::Recompute::kNone, plan::Recompute::kCheap, plan::Recompute::kBlock}) {
        config_.memory.recompute = recompute;
        const Trained trained = train_on(4);
        expect_alike(trained, one, "dp 2 tp 2");
        digests.insert(trained.digest);
        EXPECT_EQ(trained.sent, trained.predicted) << plan::name(recompute);
      }
    }
    EXPECT_EQ(digests.size(), 1u);
    config_.memory.recompute = plan::Recompute::kNone;
    config_.parallel.async_tp = false;
  }
}

/// What is computed again exchanges its activations again, and changes no bit.
TEST_F(TensorParallel, RecomputedBlocksAndSchedulesChangeNoBit) {
  for (const bool llama : {false, true}) {
    if (llama) use_llama();
    on(1, 1, 2);
    config_.train.micro_batch = 2;
    std::set<std::string> digests;
    for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kCheap,
                                            plan::Recompute::kBlock, plan::Recompute::kAllButAttention}) {
      config_.memory.recompute = recompute;
      const Trained trained = train_on(2);
      digests.insert(trained.digest);
      EXPECT_EQ(trained.sent, trained.predicted) << plan::name(recompute);
    }
    EXPECT_EQ(digests.size(), 1u);
    config_.memory.recompute = plan::Recompute::kNone;
    on(2, 1, 2);
    config_.model.n_layers = 4;
    digests.clear();
    for (const plan::ScheduleName schedule :
         {plan::ScheduleName::kGpipe, plan::ScheduleName::k1F1B, plan::ScheduleName::kZbV}) {
      config_.pipeline.schedule = schedule;
      const Trained trained = train_on(4);
      digests.insert(trained.digest);
      EXPECT_EQ(trained.sent, trained.predicted) << plan::name(schedule);
    }
    config_.pipeline.schedule = plan::Config().pipeline.schedule;
    config_.model.n_layers = 2;
    EXPECT_EQ(digests.size(), 1u);
  }
}

/// Law 1: the initial weights of every layout are the same to the bit.
TEST_F(TensorParallel, StartsFromTheSameWeights) {
  config_.train.steps = 1;
  config_.optim.lr = config_.optim.min_lr = 0.0;
  on(1, 1, 1);
  const std::string one = train_on(1).digest;
  for (const int64_t tp : {2, 4}) {
    on(1, 1, tp);
    EXPECT_EQ(train_on(tp).digest, one) << tp;
  }
  on(2, 1, 2);
  EXPECT_EQ(train_on(4).digest, one);
}

/// A checkpoint knows whole parameters: it goes on where it was, and on other meshes, with exactly its
/// weights.
TEST_F(TensorParallel, CheckpointsGoOnOnAnyMesh) {
  config_.checkpoint.every = 3;
  config_.train.val_every = 0;
  config_.parallel.policy = plan::PolicyName::kZero1;
  on(1, 1, 2);
  const Trained whole = train_on(4);
  const std::filesystem::path kept = folder_ / "kept";
  const auto go_on = [&](int64_t ranks) {
    std::filesystem::remove_all(checkpoints());
    std::filesystem::copy(kept, checkpoints(), std::filesystem::copy_options::recursive);
    resume_from_ = checkpoints() + "/step-00000003";
    const Trained trained = train_on(ranks, /*resume=*/true);
    resume_from_.clear();
    return trained;
  };
  std::filesystem::copy(checkpoints(), kept, std::filesystem::copy_options::recursive);
  EXPECT_EQ(go_on(4).digest, whole.digest);
  struct Mesh {
    int64_t ranks, pp, tp, cp = 1;
  };
  for (const Mesh& mesh :
       {Mesh{1, 1, 1}, Mesh{2, 1, 2}, Mesh{4, 1, 4}, Mesh{4, 2, 2}, Mesh{2, 2, 1}, Mesh{4, 1, 2, 2}}) {
    on(mesh.pp, 1, mesh.tp, mesh.cp);
    const Trained trained = go_on(mesh.ranks);
    ASSERT_EQ(trained.losses.size(), 2u);
    EXPECT_NEAR(trained.losses[0], whole.losses[3], 1e-5);
    EXPECT_NEAR(trained.losses[1], whole.losses[4], 1e-5);
    EXPECT_LE(weight_distance(trained, whole), 1e-4) << mesh.pp << " " << mesh.tp;
  }
}

/// bf16 products, FP8 emulated: no further from one process than that is from fp32.
TEST_F(TensorParallel, TrainsInFewBits) {
  use_llama();
  config_.model.d_model = 64;
  config_.model.d_ff = 128;
  config_.model.n_kv_heads = 4;
  on(1, 1, 1);
  const Trained exact = train_on(1);
  config_.precision.compute = plan::Dtype::kBf16;
  for (const plan::Fp8 recipe : {plan::Fp8::kOff, plan::Fp8::kTensorwise, plan::Fp8::kRowwise}) {
    config_.precision.fp8.recipe = recipe;
    config_.precision.fp8.fallback = plan::Fp8Fallback::kEmulate;
    on(1, 1, 1);
    const Trained one = train_on(1);
    on(1, 1, 2);
    const Trained two = train_on(2);
    EXPECT_EQ(two.sent, two.predicted) << plan::name(recipe);
    EXPECT_LE(weight_distance(two, one), 1.5 * weight_distance(one, exact)) << plan::name(recipe);
    EXPECT_LE(weight_distance(two, exact), 1.5 * weight_distance(one, exact)) << plan::name(recipe);
    on(1, 1, 1, 2);
    config_.parallel.cp_kind = plan::CpKind::kRing;
    const Trained ring = train_on(2);
    EXPECT_EQ(ring.sent, ring.predicted) << plan::name(recipe);
    EXPECT_LE(weight_distance(ring, one), 1.5 * weight_distance(one, exact)) << plan::name(recipe);
  }
}

/// Cuts at any place, and copies of tied embeddings on two stages that are rounded alike.
TEST_F(TensorParallel, KeepsOptimizerStateInFewBits) {
  for (const plan::OptimState state : {plan::OptimState::kBf16, plan::OptimState::kInt8}) {
    config_.optim.state = state;
    on(1, 1, 1);
    const Trained one = train_on(1);
    for (const int64_t pp : {1, 2}) {
      on(pp, 1, 2);
      const Trained two = train_on(4);
      EXPECT_LE(weight_distance(two, one), 5e-3) << plan::name(state) << " pp " << pp;
      EXPECT_EQ(two.sent, two.predicted);
    }
  }
}

/// Ranks along cp have the same data, and one of them writes what all have.
TEST_F(TensorParallel, SavesWhatHooksRemember) {
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.comm_hook = plan::CommHook::kTopK;
  config_.checkpoint.every = 2;
  config_.train.val_every = 0;
  on(1, 1, 1, 2);
  const TrainResult result = Resume::run(4, /*resume=*/false);
  EXPECT_EQ(result.summary.checkpoints_failed, 0);
  EXPECT_GE(result.summary.checkpoints, 2);
}

/// Ranks along cp shard parameters, too.
TEST_F(TensorParallel, ParametersAreReshardedOverRanksAlongCp) {
  config_.parallel.reshard_after_forward = {plan::ReshardAfterForward::Kind::kOver, 2};
  on(1, 1, 1, 4);
  const Trained trained = train_on(4);
  config_.parallel.reshard_after_forward = plan::Config().parallel.reshard_after_forward;
  EXPECT_EQ(train_on(4).digest, trained.digest);
}

/// Ranks drop elements of their own rows.
TEST_F(TensorParallel, AccumulatesAndDrops) {
  config_.train.micro_batch = 2;
  on(1, 1, 1);
  const Trained one = train_on(1);
  on(1, 1, 2);
  expect_alike(train_on(2), one, "accumulation 4");
  config_.model.dropout = 0.2;
  const Trained dropped = train_on(2);
  EXPECT_LT(dropped.losses.back(), dropped.losses.front());
  EXPECT_EQ(dropped.sent, dropped.predicted);
}

TEST_F(TensorParallel, IsRefusedWhereRanksCannotShare) {
  const auto refused = [&](const std::string& words) {
    test::expect_refusal([&] { plan::check_config(config_); }, {words});
  };
  config_.parallel.tp = 3;
  refused("heads and features can be shared by 1, 2, 4 ranks");
  config_.parallel.tp = 2;
  config_.data.seq_len = 31;
  config_.model.max_seq_len = 32;
  refused("make data.seq_len a multiple of it");
  config_.data.seq_len = 32;
  config_.parallel.comm_hook = plan::CommHook::kPowerSgd;
  config_.parallel.policy = plan::PolicyName::kDdp;
  refused("copies of norms would drift apart");
  config_.parallel.comm_hook = plan::CommHook::kNone;
  config_.comm.reduction = plan::Reduction::kBackend;
  refused("set comm.reduction to ordered");
  config_.comm.reduction = plan::Reduction::kOrdered;
  config_.model.vocab_size = 15;
  config_.data.tokenizer = "other";
  refused("a vocabulary of 15 rows, 8 or more each");
  config_.model.vocab_size = 257;
  config_.data.tokenizer = plan::Config().data.tokenizer;
  config_.parallel.tp = 1;
  config_.parallel.cp = 2;
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  refused("would compute it with different weights");
  config_.parallel.comm_hook = plan::CommHook::kNone;
  config_.parallel.cp = 1;
  config_.parallel.tp = 2;
  config_.precision.compute = plan::Dtype::kFp16;
  refused("set precision.compute to bf16");
  config_.precision.compute = plan::Dtype::kFp32;
  config_.model.family = plan::ModelFamily::kMlp;
  refused("use gpt2 or llama");
}

}  // namespace
}  // namespace trireme::train
