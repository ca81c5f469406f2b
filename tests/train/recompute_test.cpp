// memory.recompute of a run: the same bits, and work done again in as many blocks as the config says.
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <string_view>

#include "tests/train/trainer_fixture.h"

namespace trireme::train {
namespace {

std::atomic<int64_t> whole_blocks{0}, norms{0};

/// Counts backward functions that compute something again, on all threads.
class CountRecomputation {
 public:
  CountRecomputation()
      : handle_(at::addGlobalCallback(
            at::RecordFunctionCallback(count).scopes({at::RecordScope::BACKWARD_FUNCTION}))) {
    whole_blocks = 0;
    norms = 0;
  }
  ~CountRecomputation() { at::removeCallback(handle_); }
  CountRecomputation(const CountRecomputation&) = delete;
  CountRecomputation& operator=(const CountRecomputation&) = delete;

 private:
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    const std::string_view name = function.name();
    if (name.find("RecomputedFunction") != std::string_view::npos) ++whole_blocks;
    if (name.find("NormLinearFunction") != std::string_view::npos) ++norms;
    return nullptr;
  }
  at::CallbackHandle handle_;
};

using EagerAttention = TrainerTest;

/// Each way to split a run, and to compute blocks again, trains what fused attention does on one rank.
TEST_F(EagerAttention, TrainsLikeFusedAttention) {
  config_.model.n_layers = 4;
  config_.train = {.steps = 4, .global_batch = 8, .micro_batch = 2, .val_batches = 0};
  config_.data.seq_len = 32;
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    config_.model.family = family;
    const auto losses = [&](int64_t ranks) {
      run(ranks);
      std::vector<double> all;
      for (const StepRecord& step : recorder_.steps) all.push_back(step.loss);
      return all;
    };
    const plan::Config whole = config_;
    const std::vector<double> fused = losses(1);
    const std::string fused_digest = recorder_.summary.weights_digest;
    config_.model.attention = plan::AttentionKind::kEager;
    const auto expect_close = [&](int64_t ranks, const char* what) {
      const std::vector<double> eager = losses(ranks);
      ASSERT_EQ(eager.size(), fused.size()) << what;
      for (size_t i = 0; i < fused.size(); ++i) EXPECT_NEAR(eager[i], fused[i], 1e-5 * fused[i]) << what;
    };
    expect_close(1, "one rank");
    const std::string digest = recorder_.summary.weights_digest;
    EXPECT_NE(digest, fused_digest) << "the key changes nothing";
    config_.memory.recompute = plan::Recompute::kBlock;
    expect_close(1, "blocks again");
    EXPECT_EQ(recorder_.summary.weights_digest, digest);
    config_.memory.recompute = plan::Recompute::kNone;
    expect_close(2, "data parallel");
    config_.parallel.tp = 2;
    expect_close(2, "tp");
    config_.parallel.tp = 1;
    config_.parallel.pp = 2;
    expect_close(2, "pp");
    config_ = whole;
  }
}

using RecomputeEvery = TrainerTest;

TEST_F(RecomputeEvery, ComputesOneInSoManyBlocksAgainAndChangesNoBit) {
  constexpr int64_t kLayers = 5, kSteps = 3, kMicroBatches = 2;
  config_.model.n_layers = kLayers;
  config_.train = {.steps = kSteps, .global_batch = 8, .micro_batch = 4, .val_batches = 0};
  for (const plan::ModelFamily family : {plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama}) {
    config_.model.family = family;
    config_.memory.recompute = plan::Recompute::kNone;
    run(1);
    const std::string kept = recorder_.summary.weights_digest;
    for (const int64_t every : {1, 2, 3, 5}) {
      const int64_t blocks = (kLayers + every - 1) / every * kSteps * kMicroBatches;
      config_.memory.recompute_every = every;
      for (const plan::Recompute recompute :
           {plan::Recompute::kBlock, plan::Recompute::kAllButAttention, plan::Recompute::kCheap}) {
        config_.memory.recompute = recompute;
        const CountRecomputation counting;
        run(1);
        EXPECT_EQ(recorder_.summary.weights_digest, kept) << plan::name(recompute) << " every " << every;
        const bool whole = plan::computes_blocks_again(recompute);
        EXPECT_EQ(whole_blocks, whole ? blocks : 0) << plan::name(family) << " every " << every;
        EXPECT_EQ(norms, whole ? 0 : 2 * blocks) << plan::name(family) << " every " << every;
      }
    }
  }
}

}  // namespace
}  // namespace trireme::train
