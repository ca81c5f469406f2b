// Law 5 for memory: what torch's allocator has given out, against plan/memory.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/engine_on_model.h"
#include "tests/support/planned_step.h"
#include "tests/support/tiny_training.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/model_family.h"

namespace trireme::train {
namespace {

using kernels::AllocationWatch;

at::Tensor of_bytes(int64_t bytes) {
  return at::empty({bytes}, at::kByte);
}

TEST(AllocationWatch, CountsWhatIsTakenAndNotGivenBack) {
  const at::Tensor older = of_bytes(1 << 20);
  const AllocationWatch watch;
  EXPECT_EQ(watch.held(), 0);
  at::Tensor kept = of_bytes(1000);
  {
    const at::Tensor passing = of_bytes(5000);
    EXPECT_EQ(watch.held(), 6000);
  }
  EXPECT_EQ(watch.held(), 1000);
  EXPECT_EQ(watch.peak(), 6000);
  const at::Tensor view = kept.narrow(0, 10, 20);
  EXPECT_EQ(watch.held(), 1000) << "views take nothing";
}

TEST(AllocationWatch, IgnoresOlderBlocksAndOtherThreads) {
  at::Tensor older = of_bytes(1 << 20), foreign;
  const AllocationWatch watch;
  std::thread([&] { foreign = of_bytes(1 << 20); }).join();
  EXPECT_EQ(watch.held(), 0);
  older.reset();
  foreign.reset();
  EXPECT_EQ(watch.held(), 0);
}

TEST(AllocationWatch, StopsAtTheEndOfItsScope) {
  at::Tensor kept;
  { const AllocationWatch first; }
  kept = of_bytes(1000);
  const AllocationWatch second;
  kept.reset();
  EXPECT_EQ(second.held(), 0);
}

plan::ModelConfig model_of(plan::ModelFamily family, int64_t length) {
  plan::ModelConfig config;
  config.family = family;
  config.n_layers = 4;
  config.d_model = 64;
  config.n_heads = 4;
  config.vocab_size = 512;
  return plan::complete(config, length);
}

plan::Dtype dtype_of(at::ScalarType compute) {
  return compute == at::kFloat ? plan::Dtype::kFp32 : plan::Dtype::kBf16;
}

/// What this rank holds of `trained` after two steps, by torch's allocator; built while that is watched.
int64_t held_after_two_steps(const plan::ModelConfig& config, const plan::ModelFacts& facts,
                             const std::shared_ptr<comm::World>& world, const parallel::Options& options) {
  const AllocationWatch watch;
  test::EngineOnModel trained(config, facts, world, options, /*seed=*/1);
  const auto optimizer = optim::build({.lr = 1e-3}, trained.engine.optimizer_params());
  for (int step = 0; step < 2; ++step) {
    const at::Tensor tokens = test::tiny_tokens(step, 2, config.vocab_size);
    trained.engine.backward(trained.model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)));
    trained.engine.step(*optimizer);
  }
  return watch.held();
}

/// What the units of a CPU rank take turns with, which stays allocated between steps: the collectives'
/// scratch and gradients in flight, two units; gathered parameters, the root, the unit in use and the one
/// gathered ahead of it, or all where they stay gathered until backward.
int64_t taken_in_turns(const plan::ModelFacts& facts, const plan::Policy& policy, int64_t element_bytes) {
  int64_t largest = 0;
  for (const plan::UnitSpec& unit : facts.units) largest = std::max(largest, unit.numel());
  const bool keeps = policy.shard_parameters && policy.reshard_after_forward == 1;
  const int64_t units = 1 + (policy.shard_gradients ? 2 : 0) + (policy.shard_parameters && !keeps ? 3 : 0);
  constexpr int64_t kPadding = 1024;
  return element_bytes * (units * (largest + kPadding) + (keeps ? facts.params + 6 * kPadding : 0));
}

TEST(AllocatedState, IsWhatThePlanSaysBesideWhatUnitsTakeTurnsWith) {
  at::set_num_threads(1);
  const plan::ModelConfig config = model_of(plan::ModelFamily::kLlama, 8);
  const plan::ModelFacts facts = plan::describe(config, 8);
  for (const char* row : {"ddp", "zero1", "zero2", "zero3", "fsdp:shard_grad_op"}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      for (const int64_t ranks : {1, 2, 3}) {
        const parallel::Options options{
            .policy = plan::find_policy(row), .compute = compute, .reduce = compute};
        const int64_t element_bytes = plan::bytes_of(dtype_of(compute));
        const plan::EngineSetting setting{.policy = options.policy,
                                          .mesh = plan::MeshShape::fit({}, ranks),
                                          .compute_bytes = element_bytes,
                                          .wire_bytes = element_bytes};
        const int64_t planned = plan::state_bytes(test::planned_step(facts.units, setting)).total();
        const int64_t turns = ranks == 1 ? 0 : taken_in_turns(facts, options.policy, element_bytes);
        const auto body = [&](const std::shared_ptr<comm::World>& world) {
          const int64_t held = held_after_two_steps(config, facts, world, options);
          SCOPED_TRACE(fmt::format("{} {} rank {} of {}", row, dtype_of(compute), world->rank(), ranks));
          EXPECT_GE(held, planned);
          EXPECT_LE(held, planned + turns + 1024) << "numbers of the step are small";
        };
        test::run_ranks(ranks, body, /*timeout_s=*/20.0, /*overall_s=*/90.0, /*peer_memory=*/false);
      }
    }
  }
}

/// Bytes a token keeps beside those of plan::ModelFacts, which leaves out the loss: final norm (input and
/// output) and logits.
double kept_for_the_loss(const plan::ModelConfig& config, int64_t element_bytes) {
  return static_cast<double>(element_bytes * (2 * config.d_model + config.vocab_size));
}

int64_t held_after_forward(const plan::ModelConfig& config, const plan::ModelFacts& facts,
                           at::ScalarType compute, plan::Recompute recompute, int64_t rows, int64_t length) {
  int64_t held = 0;
  test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
    const parallel::Options options{
        .policy = plan::find_policy("ddp"), .compute = compute, .reduce = compute};
    test::EngineOnModel trained(config, facts, std::move(world), options, /*seed=*/1,
                                {.recompute = recompute});
    const at::Tensor tokens = at::randint(config.vocab_size, {rows, length + 1}, at::kLong);
    const at::Tensor inputs = tokens.narrow(1, 0, length), targets = tokens.narrow(1, 1, length).contiguous();
    const AllocationWatch watch;
    const at::Tensor loss = trained.model->loss(inputs, targets);
    held = watch.held();
  });
  return held;
}

TEST(AllocatedActivations, AreWhatThePlanSaysBesideTheLoss) {
  at::set_num_threads(1);
  constexpr int64_t kLength = 64, kRows = 4;
  for (const plan::ModelFamily family : plan::language_families()) {
    for (const plan::Recompute recompute : plan::all_values<plan::Recompute>()) {
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
        if (recompute == plan::Recompute::kCheap && family == plan::ModelFamily::kMlp) continue;
        const plan::ModelConfig config = model_of(family, kLength);
        const plan::ModelFacts facts =
            plan::describe(config, kLength, {.compute = dtype_of(compute)}, {.recompute = recompute});
        const double expected =
            kRows * kLength *
            (facts.saved_bytes_per_token + kept_for_the_loss(config, plan::bytes_of(dtype_of(compute))));
        const auto held =
            static_cast<double>(held_after_forward(config, facts, compute, recompute, kRows, kLength));
        SCOPED_TRACE(fmt::format("{} {} {}", family, recompute, dtype_of(compute)));
        EXPECT_GE(held, expected);
        EXPECT_LE(held, 1.02 * expected + 16384) << "statistics of norms, rotations and the like";
      }
    }
  }
}

/// Bytes a token keeps for dropout beyond the plan, which counts two masks of bytes a block: on a CPU torch
/// keeps them in the dtype of what is dropped, and there is one more behind the embeddings.
double kept_for_dropout(const plan::ModelConfig& config, plan::Recompute recompute, int64_t element_bytes) {
  if (config.dropout == 0.0) return 0.0;
  const int64_t in_blocks = recompute == plan::Recompute::kBlock ? 0 : 2 * config.n_layers;
  return static_cast<double>(config.d_model * (in_blocks * (element_bytes - 1) + element_bytes));
}

/// Dropout keeps the mask of the weights, a byte each, and what it leaves of them.
TEST(AllocatedActivations, OfEagerAttentionAreWhatThePlanSays) {
  at::set_num_threads(1);
  constexpr int64_t kLength = 96, kRows = 4;
  struct Case {
    plan::ModelFamily family;
    int64_t kv_heads;
    double dropout;
    plan::Recompute recompute = plan::Recompute::kNone;
  };
  for (const Case& given : {Case{plan::ModelFamily::kGpt2, 4, 0.0}, Case{plan::ModelFamily::kGpt2, 4, 0.1},
                            Case{plan::ModelFamily::kLlama, 2, 0.0}, Case{plan::ModelFamily::kLlama, 4, 0.0},
                            Case{plan::ModelFamily::kLlama, 2, 0.0, plan::Recompute::kCheap},
                            Case{plan::ModelFamily::kGpt2, 4, 0.1, plan::Recompute::kBlock}}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      plan::ModelConfig config = model_of(given.family, kLength);
      config.n_kv_heads = given.kv_heads;
      config.dropout = given.dropout;
      config.attention = plan::AttentionKind::kEager;
      const plan::ModelFacts facts =
          plan::describe(config, kLength, {.compute = dtype_of(compute)}, {.recompute = given.recompute});
      const int64_t element = plan::bytes_of(dtype_of(compute));
      const double expected = kRows * kLength *
                              (facts.saved_bytes_per_token + kept_for_the_loss(config, element) +
                               kept_for_dropout(config, given.recompute, element));
      const auto held =
          static_cast<double>(held_after_forward(config, facts, compute, given.recompute, kRows, kLength));
      SCOPED_TRACE(fmt::format("{} {} {} {} {}", given.family, given.kv_heads, given.dropout, given.recompute,
                               dtype_of(compute)));
      EXPECT_GE(held, expected);
      EXPECT_LE(held, 1.02 * expected + 16384) << "statistics of norms, rotations and the like";
    }
  }
}

}  // namespace
}  // namespace trireme::train
