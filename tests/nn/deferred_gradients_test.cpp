// Backward in two halves gives the bits of backward in one, keeps what the second half needs and nothing
// longer than that, and leaves alone what is not ours.
#include "trireme/nn/deferred_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/memory/recompute.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/recomputed.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"

namespace trireme::nn {
namespace {

using Gradients = std::map<std::string, at::Tensor>;

at::Tensor leaf(at::IntArrayRef shape) {
  return at::randn(shape).requires_grad_();
}

struct Setting {
  plan::ModelFamily family;
  bool tied = false;
  at::ScalarType dtype = at::kFloat;
  plan::Recompute recompute = plan::Recompute::kNone;
  bool lends = true;  ///< gradients get memory as the engine gives it
};

plan::ModelConfig config_of(const Setting& setting) {
  plan::ModelConfig config;
  config.family = setting.family;
  config.n_layers = 2;
  config.d_model = 24;
  config.n_heads = 4;
  config.n_kv_heads = setting.family == plan::ModelFamily::kLlama ? 2 : 4;
  config.d_ff = 56;
  config.vocab_size = 37;
  config.tie_embeddings = setting.tied;
  return plan::complete(config, 8);
}

std::shared_ptr<LanguageModel> make(const Setting& setting) {
  const plan::ModelConfig config = config_of(setting);
  const auto model = build(config);
  const InitialWeights initial(config, 3);
  for (const auto& entry : model->named_parameters()) {
    at::Tensor param = entry.value(), values = at::empty({param.numel()});
    initial(entry.key(), plan::Region::whole(param.sizes().vec()), values);
    param.set_data(values.view(param.sizes()).to(setting.dtype));
    if (setting.lends) lend_gradient(param, at::full_like(param, std::nan("")));
  }
  model->recompute_cheap(setting.recompute == plan::Recompute::kCheap ? 1 : 0);
  if (setting.recompute == plan::Recompute::kBlock) {
    model->set_unit_runner([](const Unit& unit, const at::Tensor& x, bool) {
      const bool block = unit.name != plan::kRootUnit && unit.name != plan::kHeadUnit;
      return block ? memory::recomputed(x, unit.forward, unit.draws) : unit.forward(x);
    });
  }
  return model;
}

Gradients gradients_of(const torch::nn::Module& module) {
  Gradients grads;
  for (const auto& entry : module.named_parameters()) grads[entry.key()] = entry.value().grad();
  return grads;
}

at::Tensor loss_of(LanguageModel& model, int64_t micro_batch) {
  const at::Tensor tokens =
      (at::arange(2 * 9, at::kLong) * 7919 + micro_batch * 31).remainder(37).view({2, 9});
  return model.loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8).contiguous());
}

void expect_equal(const Gradients& got, const Gradients& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [name, grad] : wanted) {
    ASSERT_TRUE(got.at(name).defined()) << name << ", " << what;
    EXPECT_TRUE(at::equal(got.at(name), grad)) << name << ", " << what;
  }
}

class DeferredGradientsOf : public ::testing::TestWithParam<plan::ModelFamily> {};

TEST_P(DeferredGradientsOf, TwoMicroBatchesInFlightAreThoseOfBackwardInOnePiece) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const plan::Recompute recompute : plan::all_values<plan::Recompute>()) {
      for (const auto& [tied, lends] :
           {std::pair(false, false), {false, true}, {true, false}, {true, true}}) {
        const Setting setting{GetParam(), tied, dtype, recompute, lends};
        const auto whole = make(setting), halves = make(setting);
        for (const int64_t micro_batch : {0, 1}) loss_of(*whole, micro_batch).backward();

        std::vector<at::Tensor> losses = {loss_of(*halves, 0), loss_of(*halves, 1)};
        std::vector<DeferredGradients> later(2);
        for (const size_t micro_batch : {0, 1}) {
          const DeferredGradients::Scope scope(later[micro_batch]);
          std::exchange(losses[micro_batch], at::Tensor()).backward();
        }
        // llama: q k v, output, gate up, down; gpt2: qkv, output, up, down; mlp: up, down
        const int64_t linears = GetParam() == plan::ModelFamily::kMlp ? 2 : 4;
        for (DeferredGradients& store : later) {
          EXPECT_EQ(store.count(), 2 * linears) << "of two blocks";
          EXPECT_GT(store.bytes(), 0);
          store.run();
          EXPECT_EQ(store.count(), 0);
          EXPECT_EQ(store.bytes(), 0);
        }
        expect_equal(
            gradients_of(*halves), gradients_of(*whole),
            fmt::format("{} {} tied {} lends {}", c10::toString(dtype), plan::name(recompute), tied, lends));
      }
    }
  }
}

TEST_P(DeferredGradientsOf, AStageHasItsInputsGradientBeforeThoseOfItsWeights) {
  const Setting setting{GetParam()};
  const auto model = make(setting);
  const std::vector<Unit> units = model->units({at::zeros({1, 8}, at::kLong)});
  const std::span<const Unit> stage = std::span(units).subspan(1);
  const at::Tensor values = at::randn({1, 8, 24});
  const at::Tensor x = values.clone().requires_grad_(), again = values.clone().requires_grad_();
  model->run(stage, x).backward();
  for (const auto& param : model->parameters()) param.mutable_grad().reset();
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    model->run(stage, again).backward();
  }
  EXPECT_TRUE(at::equal(again.grad(), x.grad()));
  const auto has_gradient = [&](const std::string& name) {
    return model->named_parameters()[name].grad().defined();
  };
  const std::vector<plan::UnitSpec> facts = plan::describe(config_of(setting), 8).units;
  for (const plan::ParamSpec& param : facts[1].params) {
    const bool of_norm =
        param.name.find("norm") != std::string::npos || param.name.find("ln_") != std::string::npos;
    EXPECT_EQ(has_gradient(param.name), of_norm) << param.name;
  }
  for (const plan::ParamSpec& param : facts.back().params)
    EXPECT_TRUE(has_gradient(param.name)) << param.name;
  later.run();
  for (const plan::ParamSpec& param : facts[1].params) EXPECT_TRUE(has_gradient(param.name)) << param.name;
}

INSTANTIATE_TEST_SUITE_P(Models, DeferredGradientsOf, ::testing::ValuesIn(plan::language_families()),
                         [](const auto& family) { return std::string(plan::name(family.param)); });

TEST(DeferredGradients, KeepInputsAndOutputGradientsSharedOnesOnce) {
  const at::Tensor x = at::randn({6, 5}), left = leaf({3, 5}), right = leaf({4, 5}), bias = leaf({4});
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    (nn::linear(x, left, {}).sum() + nn::linear(x, right, bias).square().sum()).backward();
  }
  EXPECT_EQ(later.count(), 2);
  // The gradient of a sum is one number, expanded to (6, 3).
  EXPECT_EQ(later.bytes(), int64_t{sizeof(float)} * (6 * 5 + 1 + 6 * 4));
}

TEST(DeferredGradients, FreeWhatTheyKeepAsTheyAreRun) {
  constexpr int64_t kWidth = 64, kLayers = 8, kRows = 32;
  std::vector<at::Tensor> weights;
  for (int64_t i = 0; i < kLayers; ++i) weights.push_back(leaf({kWidth, kWidth}));
  at::Tensor x = at::randn({kRows, kWidth});
  for (const at::Tensor& weight : weights) x = nn::linear(x, weight, {});
  const kernels::AllocationWatch watch;
  DeferredGradients later;
  at::Tensor loss = x.square().sum();
  x.reset();
  {
    const DeferredGradients::Scope scope(later);
    loss.backward();
  }
  loss.reset();
  const int64_t kept = later.bytes(), weight_bytes = weights[0].nbytes();
  EXPECT_EQ(kept, kLayers * 2 * int64_t{sizeof(float)} * kRows * kWidth);
  EXPECT_EQ(2 * int64_t{sizeof(float)} * kRows * kWidth, weight_bytes)
      << "so that a layer frees what it takes";
  later.run();
  // Beside what is kept: the first gradient of a weight, and what passed between two layers in backward.
  EXPECT_LT(watch.peak(), kept + 2 * weight_bytes);
}

TEST(DeferredGradients, OfAGradientThatIsThereAreAddedToIt) {
  const at::Tensor x = at::ones({2, 3}), weight = leaf({4, 3}), bias = leaf({4});
  weight.mutable_grad() = at::full({4, 3}, 10.0f);
  const at::Tensor grad = weight.grad();
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    nn::linear(x, weight, bias).sum().backward();
  }
  EXPECT_TRUE(at::equal(grad, at::full({4, 3}, 10.0f)));
  later.run();
  EXPECT_TRUE(at::equal(grad, at::full({4, 3}, 12.0f))) << "in place";
  EXPECT_TRUE(at::equal(bias.grad(), at::full({4}, 2.0f)));
}

TEST(DeferredGradients, GoToTheInnermostScopeOfTheThreadThatBeganBackward) {
  const at::Tensor x = at::ones({2, 3}), weight = leaf({4, 3});
  const auto pass = [&] { nn::linear(x, weight, {}).sum().backward(); };
  DeferredGradients outer, inner, other;
  {
    const DeferredGradients::Scope scope(outer);
    pass();
    {
      const DeferredGradients::Scope nested(inner);
      pass();
      pass();
    }
    std::thread([&] {
      pass();  // nobody defers here
      const DeferredGradients::Scope elsewhere(other);
      for (int i = 0; i < 3; ++i) pass();
    }).join();
  }
  EXPECT_EQ(outer.count(), 1);
  EXPECT_EQ(inner.count(), 2);
  EXPECT_EQ(other.count(), 3);
  pass();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({4, 3}, 4.0f))) << "of two passes that were not deferred";
  for (DeferredGradients* store : {&outer, &inner, &other}) store->run();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({4, 3}, 16.0f)));
}

TEST(DeferredGradients, AreNotThoseOfTorchsModulesNorOfHeads) {
  torch::nn::Linear theirs(3, 4);
  const at::Tensor head = leaf({5, 4});
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    logits(theirs(at::ones({2, 3})), head).sum().backward();
  }
  EXPECT_EQ(later.count(), 0);
  EXPECT_TRUE(theirs->weight.grad().defined() && theirs->bias.grad().defined() && head.grad().defined());
}

TEST(DeferredGradients, OfFrozenWeightsDoNotExist) {
  const at::Tensor x = leaf({2, 3}), frozen = at::randn({4, 3}), bias = leaf({4});
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    nn::linear(x, frozen, {}).sum().backward();
    EXPECT_EQ(later.count(), 0);
    nn::linear(x, frozen, bias).sum().backward();
    EXPECT_EQ(later.count(), 1);
  }
  later.run();
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_TRUE(at::equal(bias.grad(), at::full({4}, 2.0f)));
}

TEST(DeferredGradients, HooksOnCompleteParametersRunInTheFirstHalf) {
  const at::Tensor x = at::ones({2, 3}), weight = leaf({4, 3});
  int completed = 0;
  const auto watch = call_when_complete(weight, [&] { ++completed; });
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    nn::linear(x, weight, {}).sum().backward();
  }
  EXPECT_EQ(completed, 1);
  EXPECT_FALSE(weight.grad().defined());
  later.run();
  EXPECT_EQ(completed, 1);
  EXPECT_TRUE(weight.grad().defined());
}

TEST(DeferredGradients, RefuseAnInputThatWasWrittenToSince) {
  const at::Tensor x = at::ones({2, 3}), weight = leaf({4, 3}), next = leaf({2, 4});
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    nn::linear(x, weight, {}).sum().backward();
    nn::linear(at::ones({2, 4}), next, {}).sum().backward();
  }
  x.fill_(7.0f);
  try {
    later.run();
    FAIL() << "it was written to";
  } catch (const LogicError& error) {
    EXPECT_NE(std::string(error.what()).find("4x3"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(weight.grad().defined());
  later.run();
  EXPECT_TRUE(next.grad().defined()) << "what came after it";
}

}  // namespace
}  // namespace trireme::nn
