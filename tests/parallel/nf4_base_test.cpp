// A base in NF4, which an engine lends to the linear layers of its model for as long as it lives.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tests/support/engine_on_model.h"
#include "tests/support/planned_step.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/plan/policy.h"

namespace trireme::test {
namespace {

using comm::World;
using plan::AdapterBase;

plan::ModelConfig on_base(AdapterBase base) {
  plan::ModelConfig config = tiny_model(plan::ModelFamily::kLlama);
  config.adapter = {.kind = plan::AdapterKind::kLora, .rank = 2, .alpha = 4.0, .base = base};
  return config;
}

int64_t lent_weights(const nn::LanguageModel& model) {
  return std::ranges::count_if(model.parameters(),
                               [](const at::Tensor& weight) { return nn::lent_nf4(weight).defined(); });
}

/// The loss of `model` in an engine that is made for it and ends here.
double loss_in_engine(nn::LanguageModel& model, AdapterBase base, const char* policy,
                      const std::shared_ptr<World>& world) {
  const plan::ModelConfig config = on_base(base);
  const plan::ModelFacts facts = plan::describe(config, 8);
  parallel::DataParallel engine(model, facts.units,
                                comm::make_mesh(world, plan::MeshShape::fit({}, world->size())),
                                {.policy = plan::find_policy(policy)}, nn::InitialWeights(config, 11));
  train::connect(model, engine);
  const plan::EngineSetting setting{.policy = plan::find_policy(policy),
                                    .mesh = plan::MeshShape::fit({}, world->size()),
                                    .compute_bytes = sizeof(float),
                                    .wire_bytes = sizeof(float)};
  EXPECT_EQ(engine.state_bytes().parameters, plan::state_bytes(planned_step(facts.units, setting)).parameters)
      << policy << ": what is kept is what the plan says";
  const at::Tensor tokens = tiny_tokens(0, 2, config.vocab_size);
  const at::Tensor loss = model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
  engine.backward(loss);
  EXPECT_EQ(lent_weights(model) > 0, base == AdapterBase::kNf4) << policy;
  return loss.item<double>();
}

TEST(Nf4Base, IsLentNoLongerThanItsEngineLives) {
  at::set_num_threads(1);
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto fresh = nn::build(on_base(AdapterBase::kModel));
    const double exact = loss_in_engine(*fresh, AdapterBase::kModel, "ddp", world);
    for (const char* const policy : {"ddp", "zero3", "fsdp"}) {
      const auto model = nn::build(on_base(AdapterBase::kNf4));
      const double rounded = loss_in_engine(*model, AdapterBase::kNf4, policy, world);
      EXPECT_NE(rounded, exact) << policy;
      EXPECT_EQ(lent_weights(*model), 0) << policy;
      EXPECT_EQ(loss_in_engine(*model, AdapterBase::kModel, "ddp", world), exact) << policy;
      EXPECT_EQ(loss_in_engine(*model, AdapterBase::kModel, "fsdp", world), exact) << policy;
      EXPECT_EQ(loss_in_engine(*model, AdapterBase::kNf4, "fsdp", world), rounded) << policy;
    }
  });
}

}  // namespace
}  // namespace trireme::test
