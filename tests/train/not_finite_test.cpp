// A gradient that is not finite is named, wherever its parameter lies.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <set>

#include "tests/support/engine_on_model.h"
#include "tests/support/tiny_training.h"

namespace trireme::train {
namespace {

/// What the ranks name after a step in which the gradient of `poisoned` alone is infinite.
std::set<std::string> named(const std::string& policy, const std::string& poisoned) {
  std::set<std::string> names;
  std::mutex mutex;
  const plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kGpt2);
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    test::EngineOnModel trained(config, plan::describe(config, 8), std::move(world),
                                {.policy = plan::find_policy(policy)}, /*seed=*/1);
    const at::Tensor tokens = test::tiny_tokens(0, 2, config.vocab_size);
    const at::Tensor loss =
        trained.model->loss(tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous());
    at::Tensor total = loss;
    if (!poisoned.empty()) {
      const at::Tensor parameter = trained.model->named_parameters()[poisoned];
      total = loss + (parameter * std::numeric_limits<float>::infinity()).sum();
    }
    trained.engine.backward(total, 0.5);
    const std::string name = trained.engine.nonfinite_parameter();
    const std::lock_guard lock(mutex);
    if (!name.empty()) names.insert(name);
  });
  return names;
}

TEST(NonFinite, TheParameterIsNamedByTheRanksThatHoldItsGradient) {
  for (const char* policy : {"ddp", "zero1", "zero2"}) {
    EXPECT_EQ(named(policy, ""), std::set<std::string>()) << policy;
    for (const char* parameter : {"transformer.wte.weight", "transformer.h.0.ln_1.bias",
                                  "transformer.h.1.attn.c_attn.weight", "transformer.h.2.mlp.c_proj.bias"}) {
      EXPECT_EQ(named(policy, parameter), std::set<std::string>{parameter}) << policy;
    }
  }
  EXPECT_EQ(named("fsdp", "transformer.wpe.weight"), std::set<std::string>{"transformer.wpe.weight"})
      << "of the root, which stays gathered";
}

}  // namespace
}  // namespace trireme::train
