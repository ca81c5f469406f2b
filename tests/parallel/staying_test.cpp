// Units that keep their memory, as recorded passes need it: what that takes, and that it changes no weight.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/support/engine_on_model.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/plan/policy.h"

namespace trireme::test {
namespace {

using comm::World;

/// Before the first step no memory is there for gradients, nor for whole parameters where ranks keep shards.
/// Sums in fp32 lie in fp32 gradients that stay whole; elsewhere ranks that update a shard each have memory
/// for its sums from reduction to update.
int64_t missing_at_first(const parallel::DataParallel& engine, const plan::Policy& policy,
                         at::ScalarType dtype) {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const bool sums_in_gradients = dtype == at::kFloat && !policy.shard_gradients;
  int64_t bytes = 0;
  for (const auto& unit : engine.units()) {
    const int64_t whole = unit->layout().numel();
    bytes += whole * size;
    if (policy.shard_parameters) bytes += whole * size;
    if (policy.shard_optimizer && !sums_in_gradients)
      bytes += whole / engine.mesh().dp->size() * int64_t{sizeof(float)};
  }
  return bytes;
}

/// Two steps of the tiny model under `policy`; with `stays`, units keep their memory from the start.
std::string digest_of(const std::shared_ptr<World>& world, const char* policy, at::ScalarType dtype,
                      bool stays) {
  const plan::ModelConfig config = tiny_model(plan::ModelFamily::kLlama);
  const plan::ModelFacts facts = plan::describe(config, 8);
  const parallel::Options options{.policy = plan::find_policy(policy), .compute = dtype, .reduce = dtype};
  EngineOnModel trained(config, facts, world, options, /*seed=*/3);
  parallel::DataParallel& engine = trained.engine;
  const auto optimizer = optim::build({.lr = 1e-2}, engine.optimizer_params());
  if (stays) {
    const std::string what = fmt::format("{} in {}", policy, c10::toString(dtype));
    const int64_t said = engine.bytes_to_stay();
    EXPECT_EQ(said, missing_at_first(engine, options.policy, dtype)) << what;
    const kernels::AllocationWatch watch;
    engine.stay_in_place();
    EXPECT_LE(watch.held(), said) << what << ": blocks that wait in a pool are not taken anew";
    EXPECT_EQ(engine.bytes_to_stay(), 0) << what;
  }
  for (int64_t step = 0; step < 2; ++step) {
    const at::Tensor tokens = tiny_tokens(step, 2 * world->size(), config.vocab_size)
                                  .chunk(world->size())[static_cast<size_t>(world->rank())];
    engine.backward(trained.model->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)));
    engine.step(*optimizer);
  }
  return weights_digest(engine);
}

TEST(StayInPlace, TakesTheBytesThatItSaysAndChangesNoBit) {
  at::set_num_threads(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const std::string stayed = digest_of(world, policy, dtype, true);
        EXPECT_EQ(stayed, digest_of(world, policy, dtype, false)) << policy << " in " << c10::toString(dtype);
      });
    }
  }
}

}  // namespace
}  // namespace trireme::test
