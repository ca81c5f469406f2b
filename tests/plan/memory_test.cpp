#include "trireme/plan/memory.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "tests/support/planned_step.h"
#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/text.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/saved_copy.h"

namespace trireme::plan {
namespace {

EngineSetting setting_of(const std::string& policy, int64_t shards, int64_t compute_bytes,
                         int64_t replicas = 1) {
  return {.policy = find_policy(policy),
          .mesh = MeshShape({1, replicas, shards, 1, 1}),
          .compute_bytes = compute_bytes,
          .wire_bytes = compute_bytes};
}

StateBytes engine_state(const std::vector<UnitSpec>& units, const EngineSetting& setting) {
  return state_bytes(test::planned_step(units, setting));
}

/// Model states as the ZeRO paper counts them (Rajbhandari et al. 2020, section 3.1): gradients in the
/// compute dtype, no padding, master and moments as optimizer state.
StateBytes paper_state(int64_t params, const EngineSetting& setting) {
  const Policy& policy = setting.policy;
  const int64_t shards = policy.shard_ranks(setting.mesh), shard = (params + shards - 1) / shards;
  const int64_t master = setting.compute_bytes == 4 ? 0 : 1;
  return {.parameters = setting.compute_bytes * (policy.shard_parameters ? shard : params),
          .gradients = setting.compute_bytes * (policy.shard_gradients ? shard : params),
          .optimizer = (setting.moments / 8 + 4 * master) * (policy.shard_optimizer ? shard : params)};
}

// The ZeRO paper's table (arXiv:1910.02054, figure 1) with K = 12: 7.5B parameters in bf16 over 64 ranks take
// 120, 31.4, 16.6 and 1.9 GB with the baseline, stages 1, 2 and 3.
TEST(PaperState, MatchesTheTableOfTheZeroPaper) {
  const std::pair<const char*, double> rows[] = {
      {"ddp", 120.0}, {"zero1", 31.4}, {"zero2", 16.6}, {"zero3", 1.9}};
  for (const auto& [policy, gigabytes] : rows) {
    const StateBytes state = paper_state(7'500'000'000, setting_of(policy, 64, 2));
    EXPECT_NEAR(static_cast<double>(state.total()) / 1e9, gigabytes, 0.06) << policy;
  }
}

const std::vector<UnitSpec> kThreeUnits = {
    {"root", {{"a", {1000, 8}}}}, {"block", {{"b", {4000, 8}}, {"c", {1024}}}}, {"head", {{"d", {2000, 8}}}}};
constexpr int64_t kParams = 8000 + 33024 + 16000;

// Ours keeps gradients in fp32 once they are reduced: 4 bytes on the optimizer's range on top of the paper's,
// and where gradients are sharded in place of its 2. A rank that has nobody to reduce with needs no second
// copy.
TEST(EngineState, IsThePapersWithReducedGradientsInFp32) {
  for (const char* policy : {"ddp", "zero1", "zero2", "zero3"}) {
    EXPECT_EQ(engine_state(kThreeUnits, setting_of(policy, 1, 2)).total(),
              paper_state(kParams, setting_of(policy, 1, 2)).total());
  }
  for (const int64_t ranks : {2, 4, 8}) {
    const auto paper = [&](const char* policy) {
      return paper_state(kParams, setting_of(policy, ranks, 2)).total();
    };
    const auto ours = [&](const char* policy) {
      return engine_state(kThreeUnits, setting_of(policy, ranks, 2)).total();
    };
    EXPECT_EQ(ours("ddp"), paper("ddp") + 4 * kParams);
    EXPECT_EQ(ours("zero1"), paper("zero1") + 4 * kParams / ranks);
    EXPECT_EQ(ours("zero2"), paper("zero2") + 2 * kParams / ranks);
    EXPECT_EQ(ours("zero3"), paper("zero3") + 2 * kParams / ranks);
  }
}

TEST(EngineState, Fp32NeedsNoMasterAndReducesInPlace) {
  EXPECT_EQ(engine_state(kThreeUnits, setting_of("ddp", 4, 4)),
            (StateBytes{.parameters = 4 * kParams, .gradients = 4 * kParams, .optimizer = 8 * kParams}));
  EXPECT_EQ(engine_state(kThreeUnits, setting_of("fsdp", 4, 4)),
            (StateBytes{.parameters = kParams, .gradients = kParams, .optimizer = 2 * kParams}));
}

TEST(EngineState, PaddingIsCountedAndReplicasDoNotShard) {
  const std::vector<UnitSpec> odd = {{"root", {{"a", {3}}}}};
  EXPECT_EQ(engine_state(odd, setting_of("ddp", 4, 4)).parameters, 4 * 4 * FlatLayout::kAlignment);
  EXPECT_EQ(engine_state(kThreeUnits, setting_of("fsdp:hybrid_shard", 4, 4, 2)),
            engine_state(kThreeUnits, setting_of("fsdp", 4, 4)));
}

// Volumes of the ZeRO paper, section 7, and of the FSDP paper: in units of the parameters' bytes times
// (n-1)/n; less the second gathering of what stays: the root, and the unit with which backward begins.
TEST(EngineWireBytes, AreTheVolumesOfThePapers) {
  constexpr int64_t kRanks = 4, kPart = 3 * 4 * kParams / kRanks, kRoot = 3 * 4 * 8000 / kRanks;
  constexpr int64_t kLast = 3 * 4 * 16000 / kRanks;
  const auto sent = [](EngineSetting setting) {
    return test::planned_step(kThreeUnits, setting).wire_bytes();
  };
  EXPECT_EQ(sent(setting_of("ddp", kRanks, 4)), 2 * kPart);
  EXPECT_EQ(sent(setting_of("zero1", kRanks, 4)), 2 * kPart);
  EXPECT_EQ(sent(setting_of("zero2", kRanks, 4)), 2 * kPart);
  EXPECT_EQ(sent(setting_of("zero3", kRanks, 4)), 3 * kPart - kRoot - kLast);
  EXPECT_EQ(sent(setting_of("fsdp:shard_grad_op", kRanks, 4)), 2 * kPart);
  EngineSetting four = setting_of("zero3", kRanks, 4);
  four.accumulation = 4;
  EXPECT_EQ(sent(four), 4 * (2 * (kPart - kRoot) - kLast) + kRoot + kPart) << "one reduction";
  four.reduces_once = false;
  EXPECT_EQ(sent(four), 4 * (2 * (kPart - kRoot) - kLast) + kRoot + 4 * kPart);
  EXPECT_EQ(sent(setting_of("ddp", 1, 4)), 0);
}

TEST(ActivationBytes, AreSavedBytesPerTokenTimesTokens) {
  ModelFacts facts;
  facts.saved_bytes_per_token = 1.5;
  EXPECT_EQ(activation_bytes(facts, 4 * 128), 768);
}

// The moments at which units of the sizes above hold most, one gathered ahead of the one in use where
// communication runs beside computation.
TEST(GatheredBytes, AreWholeParametersAndGradientsOfUnitsInFlight) {
  constexpr int64_t kRoot = 8000, kBlock = 33024, kHead = 16000;
  const auto gathered = [](const char* policy, bool beside, int64_t prefetch = 1, int64_t accumulation = 1) {
    EngineSetting setting = setting_of(policy, 4, 2);
    setting.beside = beside;
    setting.prefetch = prefetch;
    setting.accumulation = accumulation;
    return gathered_bytes(test::planned_step(kThreeUnits, setting));
  };
  EXPECT_EQ(gathered("ddp", false), 0);
  EXPECT_EQ(gathered("zero1", false), 0);
  EXPECT_EQ(gathered("zero2", false), 2 * (kRoot + kBlock));
  EXPECT_EQ(gathered("zero2", true), 2 * (kRoot + kBlock + kHead)) << "the head is still being reduced";
  EXPECT_EQ(gathered("zero3", false), 2 * 2 * (kRoot + kBlock)) << "in the backward pass of the block";
  EXPECT_EQ(gathered("zero3", true), 2 * (kRoot + kBlock) + 2 * (kRoot + kBlock + kHead));
  EXPECT_EQ(gathered("zero3", true, 9), gathered("zero3", true, 1)) << "there are no more";
  EXPECT_EQ(gathered("fsdp:shard_grad_op", false),
            std::max(2 * kParams + 2 * (kRoot + kHead), 2 * 2 * (kRoot + kBlock)));
  // fp32 sums of all units while the head's travels, or of those that are left while the block's does.
  EXPECT_EQ(gathered("zero2", false, 1, 2),
            std::max(4 * kParams + 2 * kHead, 4 * (kRoot + kBlock) + 2 * kBlock));
}

TEST(RankBytes, AddUpToThePeakAndNeverOverflow) {
  Config config;
  config.model = complete(config.model, config.data.seq_len);
  const RankBytes needed = rank_bytes(config, 2, Device::kCpu);
  EXPECT_EQ(needed.logits, 8 * 128 * 256 * 4);  // micro-batch x data.seq_len x vocabulary, fp32
  EXPECT_EQ(needed.baseline, process_baseline(Device::kCpu, 2));
  EXPECT_EQ(needed.peak(), needed.step.total() + needed.baseline);
  EXPECT_EQ(needed.step.for_loss, needed.logits) << "made where activations are at their most";
  EXPECT_EQ(needed.step.activations, needed.activations);
  EXPECT_LE(needed.peak(),
            needed.state.total() + needed.gathered + needed.activations + needed.logits + needed.baseline);
  EXPECT_LT(needed.least(), needed.peak());
  config.memory.loss_chunk_mib = 1;
  config.model.vocab_size = 1 << 20;
  const int64_t tokens = 8 * 128, vocab = 1 << 20, width = config.model.d_model;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).logits, (1 << 20) + (tokens + vocab) * width * 4)
      << "a GPU holds logits in parts, and the gradients of what made them";
  config.model.vocab_size = vocab - 63;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).logits,
            (1 << 20) + vocab * width * 4 + (tokens + vocab) * width * 4)
      << "and a copy of the weight, with rows of zeros up to a multiple of 64";
  const int64_t most = std::numeric_limits<int64_t>::max();
  const RankBytes beyond{.state = {most / 2, 0, most / 2},
                         .activations = most / 2,
                         .step = {.kept = most / 2, .activations = most / 2, .boundaries = most / 2}};
  EXPECT_EQ(beyond.least(), most);
  EXPECT_EQ(beyond.peak(), most);
}

/// The gradient of a frozen head is not made, whether it is tied or cut over tp or not.
TEST(RankBytes, AFrozenHeadHasNoGradientThatTheLossMakes) {
  for (const char* tied : {"true", "false"}) {
    for (const int64_t tp : {1, 2}) {
      const auto loss_of = [&](const std::string& kind) {
        const Config config = load({.overrides = {"model.family=llama", "precision.compute=bf16",
                                                  "model.vocab_size=4096", fmt::format("parallel.tp={}", tp),
                                                  fmt::format("model.tie_embeddings={}", tied),
                                                  "adapter.kind=" + kind, "train.micro_batch=2"}},
                                   Environment())
                                  .config;
        return rank_bytes(config, 2, Device::kCuda).logits;
      };
      EXPECT_EQ(loss_of("none") - loss_of("lora"), 4096 / tp * 128 * 2) << tied << " " << tp;
    }
  }
}

TEST(RankBytes, OfASpreadHeadHaveLogitsAtWorkAsTheDeviceComputesThem) {
  Config config = load({.overrides = {"parallel.pp=2", "pipeline.spread_head=true", "precision.compute=bf16",
                                      "model.vocab_size=4096", "data.seq_len=128", "train.global_batch=8",
                                      "train.micro_batch=2"}},
                       Environment())
                      .config;
  constexpr int64_t kLogits = 2 * 128 * 2048;  // micro-batch x data.seq_len x rows of a rank
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).logits, 2 * kLogits) << "exponentials, or gradients";
  EXPECT_EQ(rank_bytes(config, 2, Device::kCpu).logits, (4 + 4 + 2) * kLogits) << "and fp32, twice";
  config.memory.loss_chunk_mib = 1;
  config.train.micro_batch = 4;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).logits, 1 << 20);
}

TEST(SavedCopy, IsNoneWhereTheStateItselfIsWritten) {
  Config config;
  config.model = complete(config.model, config.data.seq_len);
  config.checkpoint.every = 1;
  config.checkpoint.async = false;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCpu).saved_copy, 0);
  EXPECT_GT(rank_bytes(config, 2, Device::kCuda).saved_copy, 0) << "a GPU's memory is not written from";
  config.optim.state = OptimState::kInt8;
  EXPECT_GT(rank_bytes(config, 2, Device::kCpu).saved_copy, 0) << "moments are written in fp32";
}

TEST(RankBytes, ABlockIsComputedAgainWhereThereAreNoLogits) {
  Config config;
  config.model = complete(config.model, config.data.seq_len);
  const RankBytes keeps = rank_bytes(config, 2, Device::kCpu);
  config.memory.recompute = Recompute::kBlock;
  const RankBytes again = rank_bytes(config, 2, Device::kCpu);
  EXPECT_EQ(keeps.in_backward, 0);
  // A block, and the gradient of its widest output, that of the first layer of the feed-forward part.
  const int64_t gradient = config.train.global_batch / 2 * config.data.seq_len * config.model.d_ff * 4;
  EXPECT_EQ(again.in_backward, (keeps.activations - again.activations) / config.model.n_layers + gradient);
  ASSERT_GT(again.in_backward, again.logits);
  EXPECT_EQ(again.step.in_backward, again.in_backward);
  EXPECT_EQ(again.step.for_loss, 0);
  config.model.vocab_size = 50257;
  const RankBytes large = rank_bytes(config, 2, Device::kCpu);
  EXPECT_GT(large.logits, large.in_backward);
  EXPECT_EQ(large.step.in_backward, 0);
  EXPECT_EQ(large.step.for_loss, large.logits);
}

/// A micro-batch of 4 sequences of 2048 rows of 2048 bf16, which is a power of two, and this rank's half.
TEST(RankBytes, GpusAlongTpShareRowsOfActivations) {
  Config config = load({.overrides = {"model.preset=llama-1b", "precision.compute=bf16", "data.seq_len=2048",
                                      "train.micro_batch=4", "train.global_batch=4", "parallel.tp=2"}},
                       Environment())
                      .config;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).exchanged, 6 * 2048 * 2048 * 2);
  EXPECT_EQ(rank_bytes(config, 2, Device::kCpu).exchanged, 0);
  config.parallel.async_tp = true;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).exchanged, 8 * 2048 * 2048 * 2);
  config.parallel.async_tp = false;
  config.train.micro_batch = 1;
  config.data.seq_len = 1536;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).exchanged, 3 * 1024 * 2048 * 2) << "the next powers of two";
  config.comm.peer_memory = false;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCuda).exchanged, 0);
}

TEST(RankBytes, AddUpEveryTermOnce) {
  // Powers of two: a sum shows which terms it has.
  RankBytes bytes{.state = {.parameters = 1, .gradients = 2, .optimizer = 4},
                  .activations = 16,
                  .boundaries = 32,
                  .exchanged = int64_t{1} << 20,
                  .baseline = 128,
                  .saved_copy = 256,
                  .step = {.kept = 512,
                           .gathered = 1024,
                           .activations = 2048,
                           .boundaries = 4096,
                           .for_loss = 8192,
                           .in_backward = 16384,
                           .decoded = 32768}};
  EXPECT_EQ(bytes.peak(), (1 << 20) + 65535 - 511 + 256 + 128);
  EXPECT_EQ(bytes.least(), 1 + 2 + 4 + 256) << "more than parameters, optimizer, activations and boundaries";
  bytes.activations = 1024;
  EXPECT_EQ(bytes.least(), 1 + 4 + 1024 + 32);
  bytes.pinned_copy = 256;
  EXPECT_EQ(bytes.peak(), (1 << 20) + 65535 - 511 + 128) << "the copy is in the host's memory";
}

TEST(RankBytes, OnlyTheLastStageHasLogits) {
  Config config =
      load({.overrides = {"model.preset=gpt-tiny", "parallel.pp=2", "train.global_batch=8"}}, Environment())
          .config;
  const std::vector<RankBytes> ranks = bytes_by_pp_rank(config, 2, Device::kCpu);
  ASSERT_EQ(ranks.size(), 2U);
  EXPECT_EQ(ranks[0].logits, 0);
  EXPECT_GT(ranks[1].logits, 0);
}

/// What replicas cannot divide is copied by the first of them; local SGD has moments on each.
TEST(SavedCopy, RoundsSharesUpAndKeepsTheMomentsOfLocalSgdWhole) {
  // 50 and 150 numbers among 3 replicas: shares of 17 and 50, in pieces of 64 bytes.
  const Config config = load({.overrides = {"model.d_model=50", "model.n_heads=2", "parallel.policy=ddp",
                                            "checkpoint.every=8", "train.global_batch=12"}},
                             Environment())
                            .config;
  const auto expected = [&](int64_t of_parameters, int64_t of_moments) {
    int64_t bytes = 0;
    for (const UnitSpec& unit : describe(config.model, config.data.seq_len).units) {
      for (const ParamSpec& param : unit.params) {
        const int64_t count = param.numel();
        bytes += saved_piece_bytes(4 * ((count + of_parameters - 1) / of_parameters)) +
                 2 * saved_piece_bytes(4 * ((count + of_moments - 1) / of_moments)) + saved_piece_bytes(8);
      }
    }
    return bytes;
  };
  EXPECT_EQ(rank_bytes(config, 3, Device::kCpu).saved_copy, expected(3, 3));
  Config local = config;
  local.parallel.comm_hook = CommHook::kLocalSgd;
  EXPECT_EQ(rank_bytes(local, 3, Device::kCpu).saved_copy, expected(3, 1));
}

/// Each rank copies its share of the fp32 parameters and of two moments, whatever the policy.
TEST(SavedCopy, IsAShareOfTheWholeState) {
  Config config;
  config.model = complete(config.model, config.data.seq_len);
  const int64_t params = describe(config.model, config.data.seq_len).params;
  EXPECT_EQ(rank_bytes(config, 2, Device::kCpu).saved_copy, 0) << "nothing is saved";
  for (const int64_t ranks : {1, 2, 4}) {
    for (const PolicyName policy : all_values<PolicyName>()) {
      config.parallel.policy = policy;
      config.checkpoint.every = 0;
      const int64_t without = rank_bytes(config, ranks, Device::kCpu).peak();
      config.checkpoint.every = 5;
      const RankBytes on_cpu = rank_bytes(config, ranks, Device::kCpu);
      const auto share = static_cast<double>(12 * params) / static_cast<double>(ranks);
      EXPECT_GE(static_cast<double>(on_cpu.saved_copy), share) << name(policy) << " on " << ranks;
      EXPECT_LE(static_cast<double>(on_cpu.saved_copy), 1.02 * share) << name(policy) << " on " << ranks;
      EXPECT_EQ(on_cpu.peak(), without + on_cpu.saved_copy) << "it is in the same memory";
      EXPECT_GE(on_cpu.least(), on_cpu.state.total() + on_cpu.saved_copy);
      const RankBytes on_gpu = rank_bytes(config, ranks, Device::kCuda);
      EXPECT_EQ(on_gpu.saved_copy, on_cpu.saved_copy);
      EXPECT_EQ(on_gpu.pinned_copy, pinned_bytes(on_gpu.saved_copy));
      config.checkpoint.every = 0;
      EXPECT_EQ(on_gpu.peak(), rank_bytes(config, ranks, Device::kCuda).peak()) << "it is the host's";
    }
  }
  config.checkpoint.every = 5;
  const int64_t without = rank_bytes(config, 1, Device::kCpu).saved_copy;
  config.optim.ema = 0.9;
  const auto average = static_cast<double>(rank_bytes(config, 1, Device::kCpu).saved_copy - without);
  EXPECT_GE(average, static_cast<double>(4 * params)) << "it is saved like a moment";
  EXPECT_LE(average, 1.02 * static_cast<double>(4 * params));
  EXPECT_EQ(pinned_bytes((6 << 20) - 1), 6 << 20);
  EXPECT_EQ(pinned_bytes(4 << 20), 4 << 20);
  EXPECT_EQ(pinned_bytes(0), 0);
}

TEST(MemoryAdvice, SaysWhatTakesMemoryAndNamesTheNextSetting) {
  Config config = load({.text = "model:\n  preset: llama-1b\n"}, Environment()).config;
  config.data.seq_len = 4096;
  config.train.global_batch = 16;
  config.train.micro_batch = 4;
  config.precision.compute = Dtype::kBf16;
  config.parallel.policy = PolicyName::kDdp;
  const std::string first = memory_advice(config, 2, Device::kCpu);
  // ddp in bf16 on several ranks: 2 + 2 bytes of parameters and gradients, 4 of reduced gradients, 12 of
  // AdamW.
  const double state = 20.0 * 1'235'814'400;
  // 16 layers keep h (12 + 4k) + 6f + 4a bytes of each token: k = 8/32, h = 2048, f = 8192, a = 32.
  const double activations = 16.0 * (2048 * 13 + 6 * 8192 + 4 * 32) * 4 * 4096;
  for (const std::string& said :
       {"model state " + format_bytes(state), "micro-batch of 4 " + format_bytes(activations)}) {
    EXPECT_NE(first.find(said), std::string::npos) << said << " in: " << first;
  }
  // Each change is given with the peak that is predicted of all up to it.
  std::string all;
  const auto expect_next = [&](std::string_view words) {
    const std::string peak = format_bytes(static_cast<double>(rank_bytes(config, 2, Device::kCpu).peak()));
    all += fmt::format("{} ({}); ", words, peak);
    EXPECT_NE(first.find(all), std::string::npos) << all << " in: " << first;
  };
  config.memory.recompute = Recompute::kCheap;
  expect_next("memory.recompute=cheap");
  config.parallel.reduce_when = ReduceWhen::kEveryMicroBatch;
  expect_next("parallel.reduce_when=every_micro_batch");
  config.memory.recompute = Recompute::kBlock;
  expect_next("memory.recompute=block");
  config.parallel.policy = PolicyName::kFsdp;
  expect_next("parallel.policy=fsdp");
  config.train.micro_batch = 2;
  expect_next("train.micro_batch=2");
  config.optim.state = OptimState::kBf16;
  expect_next("optim.state=bf16");
}

TEST(MemoryAdvice, LeavesOutWhatDoesNotHelpOrIsRefused) {
  Config config = load({.text = "model:\n  preset: llama-8b\n"}, Environment()).config;
  config.precision.compute = Dtype::kBf16;
  config.parallel.policy = PolicyName::kFsdp;
  config.memory.recompute = Recompute::kBlock;
  config.train.micro_batch = 1;
  config.optim.state = OptimState::kBf16;
  const auto advises = [&](std::string_view words) {
    const std::string advice = memory_advice(config, 2, Device::kCpu);
    EXPECT_NE(advice.find("if needed: " + std::string(words)), std::string::npos)
        << words << " in: " << advice;
  };
  config.train.global_batch = 2;
  advises("a shorter data.seq_len");
  // Whole gradients are kept between micro-batches: a third of the peak.
  config.train.global_batch = 8;
  advises("parallel.reduce_when=every_micro_batch (");
  config.train.global_batch = 14;
  config.train.micro_batch = 7;  // halves are no part of 7
  config.parallel.reduce_when = ReduceWhen::kEveryMicroBatch;
  advises("train.micro_batch=1 (");
}

TEST(MemoryAdvice, OfModelsOfImagesSpeaksOfNoSequences) {
  const Config config = load({.overrides = {"model.preset=resnet18"}}, Environment()).config;
  const std::string advice = memory_advice(config, 2, Device::kCuda);
  EXPECT_EQ(advice.find("seq_len"), std::string::npos) << advice;
  EXPECT_TRUE(advice.ends_with("; more ranks")) << advice;
}

TEST(MemoryAdvice, OfAPipelineChangesTheKeyThatSaysHowLargeMicroBatchesAre) {
  const auto advice = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), {"parallel.pp=2", "train.global_batch=64", "data.seq_len=1024"});
    return memory_advice(load({.overrides = std::move(overrides)}, Environment()).config, 2, Device::kCpu);
  };
  test::expect_mentions(
      advice({"pipeline.micro_batches=8"}),
      {"activations of all micro-batches in flight, of 8 each, ", "; pipeline.micro_batches=16 ("});
  test::expect_mentions(advice({}), {"pipeline.micro_batches=16 ("});
  test::expect_mentions(advice({"train.micro_batch=16"}), {"; train.micro_batch=8 ("});
  test::expect_mentions(advice({"pipeline.micro_batches=4", "train.micro_batch=16"}),
                        {"pipeline.micro_batches=8 with train.micro_batch=8 ("});
}

TEST(MemoryAdvice, SizesBeyond64BitsAreRefused) {
  const Config config =
      load({.overrides = {"data.seq_len=100000000", "model.d_model=1000000", "model.n_heads=8",
                          "model.n_layers=20", "train.global_batch=1000000000", "parallel.pp=2",
                          "pipeline.micro_batches=2"}},
           Environment())
          .config;
  test::expect_refusal([&] { rank_bytes(config, 2, Device::kCpu); },
                       {"micro-batches of 500000000", "data.seq_len=100000000", "more bytes than 64 bits"});
}

}  // namespace
}  // namespace trireme::plan
