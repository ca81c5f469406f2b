// Ranks along tp and cp on GPUs learn what one GPU learns, in fp32 and, with blocks computed again, in bf16.
// One process a GPU; skipped where there are too few. Built for two GPUs and for four.
#include <cmath>

#include "tests/train/gpu_staged_fixture.h"

namespace trireme::train {
namespace {

struct Axes {
  int64_t pp, cp, tp;
  plan::CpKind kind = plan::CpKind::kUlysses;
};

class GpuTensorParallel : public GpuRanksTest, public ::testing::WithParamInterface<int64_t> {
 protected:
  void SetUp() override {
    set_up_on(GetParam());
    config_.model.vocab_size = 259;
    config_.model.d_model = 64;
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.model.d_ff = 96;
  }

  Outcome outcome_of(const std::shared_ptr<comm::World>& world, const Axes& axes) {
    config_.parallel.pp = axes.pp;
    config_.parallel.cp = axes.cp;
    config_.parallel.tp = axes.tp;
    config_.parallel.cp_kind = axes.kind;
    return outcome_on(world);
  }

  std::vector<Axes> meshes() const {
    constexpr plan::CpKind kRing = plan::CpKind::kRing;
    if (GetParam() == 2) return {{1, 1, 1}, {1, 1, 2}, {1, 2, 1}, {1, 2, 1, kRing}};
    return {{1, 1, 4}, {1, 2, 2}, {2, 1, 2}, {1, 1, 2}, {1, 4, 1, kRing}, {1, 2, 2, kRing}};
  }

  int run_cases(int64_t rank) {
    load_kernels_at_once();
    const auto world = test::join_gpus(rank, GetParam(), port_, /*timeout_s=*/60.0, {});
    for (const bool llama : {false, true}) {
      config_.model.family = llama ? plan::ModelFamily::kLlama : plan::ModelFamily::kGpt2;
      config_.model.n_kv_heads = llama ? 2 : 4;
      config_.model.tie_embeddings = !llama;
      Outcome one;
      if (rank == 0) one = outcome_of(test::one_gpu(), {1, 1, 1});
      for (const Axes& axes : meshes()) {
        const Outcome many = outcome_of(world, axes);
        if (rank != 0) continue;
        const std::string what = fmt::format("{}, pp {} cp {} tp {}, {}", config_.model.family, axes.pp,
                                             axes.cp, axes.tp, axes.kind);
        expect_near(many, one, what);
        const RunCost& cost = many.recorder.summary.cost;
        EXPECT_EQ(cost.measured_wire_bytes, cost.predicted_wire_bytes) << what;
      }
      compare_in_pieces(world, one);
      compare_in_bf16(world, one);
    }
    return HasFailure() ? 1 : 0;
  }

  /// Products beside transfers, twice to the same bits.
  void compare_in_pieces(const std::shared_ptr<comm::World>& world, const Outcome& one) {
    config_.parallel.async_tp = true;
    const Outcome pieces = outcome_of(world, {1, 1, 2}), again = outcome_of(world, {1, 1, 2});
    config_.parallel.async_tp = false;
    if (world->rank() != 0) return;
    expect_near(pieces, one, "products in pieces");
    const auto digest = [](const Outcome& outcome) { return outcome.recorder.summary.weights_digest; };
    EXPECT_EQ(digest(pieces), digest(again));
  }

  /// Relative, over the weights of all parameters together.
  static double distance(const Outcome& got, const Outcome& wanted) {
    double difference = 0.0, size = 0.0;
    for (const auto& [name, weight] : wanted.weights) {
      difference += (got.weights.at(name) - weight).to(at::kDouble).square().sum().item<double>();
      size += weight.to(at::kDouble).square().sum().item<double>();
    }
    return std::sqrt(difference / size);
  }

  /// No further from one GPU than that is from `exact`, its weights in fp32. Biases are where notes of
  /// kernels are lost.
  void compare_in_bf16(const std::shared_ptr<comm::World>& world, const Outcome& exact) {
    config_.precision.compute = plan::Dtype::kBf16;
    config_.memory.recompute = plan::Recompute::kBlock;
    Outcome one;
    if (world->rank() == 0) one = outcome_of(test::one_gpu(), {1, 1, 1});
    const Outcome many = outcome_of(world, {1, 1, 2});
    const Outcome ring = outcome_of(world, {1, 2, 1, plan::CpKind::kRing});
    config_.precision.compute = plan::Dtype::kFp32;
    config_.memory.recompute = plan::Config().memory.recompute;
    if (world->rank() != 0) return;
    EXPECT_LE(distance(many, one), 1.5 * distance(one, exact)) << plan::name(config_.model.family);
    EXPECT_LE(distance(ring, one), 1.5 * distance(one, exact)) << plan::name(config_.model.family);
    for (const auto& [name, weight] : one.weights) {
      if (!name.ends_with("c_proj.bias")) continue;
      EXPECT_LE((many.weights.at(name) - weight).norm().item<double>(), 0.2 * weight.norm().item<double>())
          << name;
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Train, GpuTensorParallel, ::testing::Values(TRIREME_TEST_GPUS),
                         [](const auto& tested) { return fmt::format("On{}", tested.param); });

TEST_P(GpuTensorParallel, LearnsWhatOneGpuLearns) {
  EXPECT_EQ(test::fork_ranks(
                GetParam(), [this](int64_t rank) { return run_cases(rank); }, 200.0),
            std::vector<int>(static_cast<size_t>(GetParam()), 0));
}

}  // namespace
}  // namespace trireme::train
