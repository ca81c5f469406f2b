// Built models agree with plan::describe in every name and shape, and respect causality.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/presets.h"

namespace trireme::nn {
namespace {

using Shapes = std::map<std::string, std::vector<int64_t>>;

void expect_described(const plan::ModelConfig& config) {
  Shapes described, built;
  for (const plan::UnitSpec& unit : plan::describe(config, 64).units) {
    for (const plan::ParamSpec& param : unit.params)
      EXPECT_TRUE(described.emplace(param.name, param.shape).second) << param.name << " is there twice";
  }
  const auto model = build(config);
  for (const auto& entry : model->named_parameters()) built.emplace(entry.key(), entry.value().sizes().vec());
  EXPECT_EQ(built, described);
}

class EveryPreset : public ::testing::TestWithParam<std::string> {};

TEST_P(EveryPreset, HasTheParametersThatThePlanDescribes) {
  plan::ModelConfig config = plan::complete(plan::find_preset(GetParam()).model, 64);
  config.n_layers = 2;  // full width, so that every shape is seen
  expect_described(config);
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const plan::Preset& preset : plan::presets()) {
    if (!plan::reads_images(preset.model.family)) names.push_back(preset.name);
  }
  return names;
}

INSTANTIATE_TEST_SUITE_P(Models, EveryPreset, ::testing::ValuesIn(preset_names()), [](const auto& preset) {
  std::string name = preset.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

class EveryFamily : public ::testing::TestWithParam<plan::ModelFamily> {
 protected:
  plan::ModelConfig config(bool tied) const {
    plan::ModelConfig config;
    config.tie_embeddings = tied;
    config.family = GetParam();
    config.n_layers = 2;
    config.d_model = 32;
    config.vocab_size = 50;
    return plan::complete(config, 16);
  }
  std::shared_ptr<LanguageModel> make(bool tied = true) const {
    const auto model = build(config(tied));
    InitialWeights(config(tied), 3).fill(*model);
    return model;
  }
};

/// What recomputation calls in backward: of a block that ends with a product, the product is left out.
TEST_P(EveryFamily, BlocksComputedAgainGiveTheSameGradientsWithoutTheirLastProduct) {
  if (!plan::record_of(GetParam()).attends) return;  // its blocks end with a sum
  plan::ModelConfig model = config(true);
  model.d_model = 128;  // FP8's blocks
  model.d_ff = 256;
  model = plan::complete(model, 64);
  std::vector<std::optional<Fp8Recipe>> recipes{std::nullopt};
  for (const auto scaling : {kernels::Fp8Scaling::kTensor, kernels::Fp8Scaling::kBlock})
    recipes.emplace_back(Fp8Recipe{.scaling = scaling});
  for (const auto& recipe : recipes) {
    const auto made = build(model);
    InitialWeights(model, 3).fill(*made);
    if (recipe) {
      made->to(at::kBFloat16);
      made->use_fp8(*recipe, [](int64_t) { return true; });
    }
    at::manual_seed(4);
    const at::Tensor input = at::randn({2, 64, 128}).to(recipe ? at::kBFloat16 : at::kFloat);
    const at::Tensor dy = at::randn_like(input);
    const auto differentiate = [&](const UnitForward& forward) {
      const at::Tensor x = input.detach().requires_grad_();
      const at::Tensor y = forward(x);
      EXPECT_EQ(y.sizes(), input.sizes());
      y.backward(dy);
      std::vector<at::Tensor> gradients{x.grad()};
      for (at::Tensor& param : made->parameters()) {
        if (param.grad().defined()) gradients.push_back(param.grad().clone());
        param.mutable_grad() = at::Tensor();
      }
      return std::pair{y, gradients};
    };
    const Unit block = made->units()[1];
    const auto [y, wanted] = differentiate(block.forward);
    const auto [unread, got] = differentiate(block.again);
    EXPECT_EQ(unread.stride(0), 0) << "values were computed";
    ASSERT_EQ(got.size(), wanted.size());
    EXPECT_GT(got.size(), 8U);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
  }
}

TEST_P(EveryFamily, HasTheParametersOfItsRecord) {
  for (const bool tied : {true, false}) {
    plan::ModelConfig odd = config(tied);  // sizes that no two dimensions share
    odd.d_ff = 72;
    odd.n_kv_heads = GetParam() == plan::ModelFamily::kLlama ? 2 : odd.n_heads;
    expect_described(odd);
  }
}

TEST_P(EveryFamily, LaterTokensDoNotChangeEarlierLogits) {
  const auto model = make();
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::arange(16).view({1, 16});
  at::Tensor changed = tokens.clone();
  changed[0][10] = 49;
  const at::Tensor before = model->forward(tokens), after = model->forward(changed);
  EXPECT_TRUE(at::equal(before.narrow(1, 0, 10), after.narrow(1, 0, 10)));
  EXPECT_FALSE(at::equal(before.select(1, 10), after.select(1, 10)));
}

TEST_P(EveryFamily, RunsUnitsWithParametersThroughTheUnitRunnerInTheOrderOfThePlan) {
  for (const bool tied : {true, false}) {
    const auto model = make(tied);
    std::vector<std::string> ran, planned, began;
    model->set_unit_runner([&](const Unit& unit, const at::Tensor& x, bool begins_pass) {
      ran.push_back(unit.name);
      if (begins_pass) began.push_back(unit.name);
      return unit.forward(x);
    });
    const at::Tensor tokens = at::zeros({1, 4}, at::kLong);
    model->forward(tokens);
    model->loss(tokens, tokens);
    for (int pass = 0; pass < 2; ++pass) {
      for (const plan::UnitSpec& unit : plan::describe(config(tied), 16).units) planned.push_back(unit.name);
    }
    EXPECT_EQ(ran, planned);
    EXPECT_EQ(ran.back() == plan::kHeadUnit, !tied);
    EXPECT_EQ(began, (std::vector<std::string>{plan::kRootUnit, plan::kRootUnit}));
  }
}

TEST_P(EveryFamily, RangesOfItsUnitsGiveWhatTheWholeModelGives) {
  for (const bool tied : {true, false}) {
    const auto model = make(tied);
    const at::Tensor tokens = at::randint(50, {2, 17}, at::kLong);
    const at::Tensor inputs = tokens.narrow(1, 0, 16), targets = tokens.narrow(1, 1, 16).contiguous();
    model->loss(inputs, targets).backward();
    std::map<std::string, at::Tensor> whole;
    for (const auto& entry : model->named_parameters()) {
      whole[entry.key()] = entry.value().grad().clone();
      entry.value().mutable_grad().reset();
    }
    const std::vector<Unit> units = model->units({targets});
    ASSERT_EQ(units.size(), 4) << "embedding, two blocks, head";
    EXPECT_EQ(units.back().has_parameters, !tied);
    for (size_t cut = 1; cut < units.size(); ++cut) {
      // Two stages, between which a tensor travels.
      const std::span<const Unit> all(units);
      const at::Tensor sent = model->run(all.first(cut), inputs);
      const at::Tensor received = sent.detach().requires_grad_();
      const at::Tensor loss = model->run(all.subspan(cut), received);
      EXPECT_TRUE(at::equal(loss, model->loss(inputs, targets))) << cut;
      loss.backward();
      sent.backward(received.grad());
      for (const auto& entry : model->named_parameters()) {
        EXPECT_TRUE(at::equal(entry.value().grad(), whole[entry.key()])) << entry.key() << ", cut at " << cut;
        entry.value().mutable_grad().reset();
      }
    }
    EXPECT_TRUE(at::equal(model->run(model->units(), inputs), model->forward(inputs)));
  }
}

TEST_P(EveryFamily, GivesTheSameGradientsInLentMemory) {
  for (const bool tied : {true, false}) {
    const auto own = make(tied), lent = make(tied);
    const at::Tensor tokens = at::randint(50, {4, 17}, at::kLong);
    const auto differentiate = [&](LanguageModel& model) {
      model.loss(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16)).backward();
    };
    for (const auto& leaf : lent->parameters()) lend_gradient(leaf, at::full_like(leaf, std::nan("")));
    differentiate(*own);
    differentiate(*lent);
    for (const auto& entry : own->named_parameters()) {
      EXPECT_TRUE(at::equal(entry.value().grad(), lent->named_parameters()[entry.key()].grad()))
          << entry.key();
    }
  }
}

TEST_P(EveryFamily, UntrainedLossIsNearTheLogOfTheVocabulary) {
  const auto model = make();
  const at::Tensor tokens = at::randint(50, {4, 17}, at::kLong);
  const double loss = model->loss(tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16)).item<double>();
  EXPECT_NEAR(loss, std::log(50.0), 0.5);
}

INSTANTIATE_TEST_SUITE_P(Models, EveryFamily, ::testing::ValuesIn(plan::language_families()),
                         [](const auto& family) { return std::string(plan::name(family.param)); });

TEST(Build, RefusesFamiliesWithoutAFactory) {
  plan::ModelConfig config;
  config.family = static_cast<plan::ModelFamily>(99);
  EXPECT_THROW(build(config), LogicError);
}

TEST(Gpt2, RefusesMoreTokensThanPositions) {
  plan::ModelConfig config;
  config.max_seq_len = 8;
  EXPECT_THROW(build(plan::complete(config, 8))->forward(at::zeros({1, 9}, at::kLong)), LogicError);
}

}  // namespace
}  // namespace trireme::nn
