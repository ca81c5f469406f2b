// Adapters on one GPU: what they learn on the CPU, with the same bits however passes are run, and through a
// stop. Skipped without a GPU.
#include <filesystem>
#include <set>

#include "tests/support/saved_tensors.h"
#include "tests/train/gpu_staged_fixture.h"
#include "trireme/kernels/device.h"

namespace trireme::train {
namespace {

using plan::AdapterBase;
using plan::AdapterKind;

class GpuAdapters : public GpuRanksTest {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
    StagedTest::SetUp();
    config_.model.vocab_size = 259;
    config_.model.d_model = config_.model.d_ff = 128;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.optim.lr = 2e-2;
    config_.train.steps = 8;
  }

  void use(bool llama, AdapterKind kind, AdapterBase base = AdapterBase::kModel) {
    config_.model.family = llama ? plan::ModelFamily::kLlama : plan::ModelFamily::kGpt2;
    config_.model.n_kv_heads = llama ? 2 : 4;
    config_.model.tie_embeddings = !llama;
    config_.model.adapter = {.kind = kind, .rank = 4, .alpha = 8.0, .base = base};
  }

  Outcome on_gpu() {
    config_.device = plan::Device::kCuda;
    return outcome_on(test::one_gpu());
  }
  std::string digest_on_gpu() { return on_gpu().recorder.summary.weights_digest; }

  /// Trains to `steps` and goes on from the checkpoint that is there.
  std::string digest_after(int64_t steps, bool resume) {
    config_.device = plan::Device::kCuda;
    config_.train.steps = steps;
    TrainOptions mine = options();
    mine.checkpoint_dir = (folder_ / "checkpoints").string();
    mine.resume = resume;
    return train(mine, test::one_gpu()).summary.weights_digest;
  }
};

TEST_F(GpuAdapters, LearnWhatTheyLearnOnTheCpu) {
  for (const bool llama : {false, true}) {
    for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
      for (const AdapterBase base : {AdapterBase::kModel, AdapterBase::kNf4}) {
        use(llama, kind, base);
        const std::string what = fmt::format("{} {} on {}", config_.model.family, kind, base);
        config_.device = plan::Device::kCpu;
        const Outcome wanted = outcome(1);
        const test::SavedAdapters adapters = test::saved_adapters(folder_ / "adapter");
        const Outcome got = on_gpu();
        ASSERT_EQ(got.recorder.steps.size(), wanted.recorder.steps.size()) << what;
        for (size_t i = 0; i < wanted.recorder.steps.size(); ++i) {
          const double loss = wanted.recorder.steps[i].loss;
          EXPECT_NEAR(got.recorder.steps[i].loss, loss, 1e-5 * loss) << what << ", step " << i + 1;
        }
        EXPECT_LT(wanted.recorder.steps.back().loss, wanted.recorder.steps.front().loss) << what;
        test::expect_near_adapters(test::saved_adapters(folder_ / "adapter"), adapters, 1e-2, what);
      }
    }
  }
}

TEST_F(GpuAdapters, HaveOneDigestHoweverPassesAreRun) {
  config_.precision.compute = plan::Dtype::kBf16;
  config_.train.deterministic = true;
  for (const bool llama : {false, true}) {
    for (const AdapterKind kind : {AdapterKind::kLora, AdapterKind::kDora}) {
      for (const double dropout : {0.0, 0.3}) {
        use(llama, kind);
        config_.model.adapter.dropout = dropout;
        std::set<std::string> digests;
        for (const plan::Recompute recompute :
             {plan::Recompute::kNone, plan::Recompute::kCheap, plan::Recompute::kBlock}) {
          if (dropout > 0.0 && recompute == plan::Recompute::kCheap) continue;  // which is refused
          config_.memory.recompute = recompute;
          for (const plan::CudaGraphs graphs : {plan::CudaGraphs::kOff, plan::CudaGraphs::kOn}) {
            const bool draws_again = dropout > 0.0 && recompute == plan::Recompute::kBlock;
            if (graphs == plan::CudaGraphs::kOn && draws_again) continue;  // which is refused
            config_.train.cuda_graphs = graphs;
            digests.insert(digest_on_gpu());
          }
        }
        EXPECT_EQ(digests.size(), 1u)
            << plan::name(config_.model.family) << ", " << plan::name(kind) << ", dropout " << dropout;
      }
    }
  }
}

TEST_F(GpuAdapters, GoOnExactly) {
  config_.precision.compute = plan::Dtype::kBf16;
  config_.train.deterministic = true;
  config_.train.val_every = 0;
  config_.optim.schedule = plan::LrSchedule::kConstant;  // whose rates do not ask for the last step
  for (const AdapterBase base : {AdapterBase::kModel, AdapterBase::kNf4}) {
    use(/*llama=*/true, AdapterKind::kDora, base);
    config_.model.adapter.dropout = 0.2;
    config_.checkpoint.every = 0;
    const std::string whole = digest_after(8, /*resume=*/false);
    config_.checkpoint.every = 4;
    digest_after(4, /*resume=*/false);
    EXPECT_EQ(digest_after(8, /*resume=*/true), whole) << plan::name(base);
    std::filesystem::remove_all(folder_ / "checkpoints");
  }
}

}  // namespace
}  // namespace trireme::train
