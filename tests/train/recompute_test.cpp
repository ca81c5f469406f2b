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
