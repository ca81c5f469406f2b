// Low-rank adapters: what they compute and how they are differentiated, against the model without adapters
// whose weights have them added.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <string>

#include "tests/support/refusal.h"
#include "trireme/memory/recompute.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/layers.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"

namespace trireme::nn {
namespace {

using NamedValues = std::map<std::string, at::Tensor>;

plan::ModelConfig adapter_config(plan::ModelFamily family, const std::string& targets,
                                 plan::AdapterKind kind = plan::AdapterKind::kLora) {
  plan::ModelConfig config;
  config.family = family;
  config.n_layers = 2;
  config.d_model = 32;
  config.n_heads = 4;
  config.n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 0;
  config.vocab_size = 50;
  config.adapter = {.kind = kind, .rank = 3, .alpha = 5.0, .targets = targets};
  return plan::complete(config, 16);
}

/// With B that is not zero, so that A has a gradient, and base weights that need none.
std::shared_ptr<LanguageModel> adapted_model(const plan::ModelConfig& config) {
  const auto model = build(config);
  InitialWeights(config, 3).fill(*model);
  const at::NoGradGuard no_grad;
  at::manual_seed(7);
  for (const auto& entry : model->named_parameters()) {
    at::Tensor value = entry.value();
    const bool trained = plan::is_of_adapter(entry.key());
    value.set_requires_grad(trained);
    if (trained) value.normal_(0.0, 0.1);
  }
  return model;
}

NamedValues values_of_module(torch::nn::Module& module) {
  NamedValues named;
  for (const auto& entry : module.named_parameters()) named[entry.key()] = entry.value();
  return named;
}

struct AdaptedLayer {
  std::string weight, first, second;  ///< names of W, A and B
};

std::vector<AdaptedLayer> adapted_layers(const NamedValues& parameters) {
  std::vector<AdaptedLayer> layers;
  const std::string suffix = std::string(plan::kAdapterIn) + ".weight";
  for (const auto& [name, value] : parameters) {
    if (!name.ends_with(suffix)) continue;
    const std::string module = name.substr(0, name.size() - suffix.size());
    layers.push_back({module + ".weight", name, module + plan::kAdapterOut + ".weight"});
  }
  return layers;
}

/// The model without adapters that computes the same.
std::shared_ptr<LanguageModel> model_of_sums(const plan::ModelConfig& config, const NamedValues& adapted) {
  plan::ModelConfig plain = config;
  plain.adapter = {};
  const auto model = build(plain);
  const at::NoGradGuard no_grad;
  NamedValues own = values_of_module(*model);
  for (auto& [name, value] : own) value.copy_(adapted.at(name));
  for (const AdaptedLayer& layer : adapted_layers(adapted)) {
    const at::Tensor change =
        plan::scale_of(config.adapter) * at::matmul(adapted.at(layer.second), adapted.at(layer.first));
    own.at(layer.weight).add_(plan::record_of(config.family).in_out ? change.t() : change);
  }
  return model;
}

void expect_close_to(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  const double size = wanted.norm().item<double>();
  EXPECT_LE((got - wanted).norm().item<double>(), 2e-5 * size) << what;
  EXPECT_GT(size, 0.0) << what;
}

class LowRankAdapters : public ::testing::TestWithParam<std::tuple<plan::ModelFamily, std::string>> {};

TEST_P(LowRankAdapters, ComputeAndLearnWhatTheirProductAddedToTheWeightsDoes) {
  const auto [family, targets] = GetParam();
  const plan::ModelConfig config = adapter_config(family, targets);
  const auto model = adapted_model(config);
  const NamedValues own = values_of_module(*model);
  const auto merged = model_of_sums(config, own);
  const at::Tensor tokens = at::randint(50, {2, 16}, at::kLong),
                   targets_of = at::randint(50, {2, 16}, at::kLong);
  expect_close_to(model->forward(tokens), merged->forward(tokens), "logits");
  model->loss(tokens, targets_of).backward();
  merged->loss(tokens, targets_of).backward();
  const NamedValues theirs = values_of_module(*merged);
  const std::vector<AdaptedLayer> layers = adapted_layers(own);
  ASSERT_FALSE(layers.empty());
  const double scale = plan::scale_of(config.adapter);
  for (const AdaptedLayer& layer : layers) {
    const at::Tensor whole = theirs.at(layer.weight).grad();
    const at::Tensor gradient = plan::record_of(family).in_out ? whole.t() : whole;  // (out, in)
    const at::Tensor a = own.at(layer.first), b = own.at(layer.second);
    expect_close_to(a.grad(), scale * at::matmul(b.t(), gradient), layer.first);
    expect_close_to(b.grad(), scale * at::matmul(gradient, a.t()), layer.second);
  }
  for (const auto& [name, value] : own) EXPECT_EQ(value.grad().defined(), plan::is_of_adapter(name)) << name;
}

/// Gradients of the adapters, which are left without them.
NamedValues gradients_of_adapters(LanguageModel& model, const at::Tensor& tokens, const at::Tensor& targets) {
  at::manual_seed(11);  // of dropout
  model.loss(tokens, targets).backward();
  NamedValues found;
  for (auto& [name, value] : values_of_module(model)) {
    if (!plan::is_of_adapter(name)) continue;
    found[name] = value.grad().clone();
    at::Tensor parameter = value;
    parameter.mutable_grad().reset();
  }
  return found;
}

TEST_P(LowRankAdapters, LearnTheSameWhereBlocksAreComputedAgain) {
  const auto [family, targets] = GetParam();
  for (const plan::AdapterKind kind : {plan::AdapterKind::kLora, plan::AdapterKind::kDora}) {
    for (const double dropout : {0.0, 0.3}) {
      plan::ModelConfig config = adapter_config(family, targets, kind);
      config.adapter.dropout = dropout;
      const auto model = adapted_model(config);
      const at::Tensor tokens = at::randint(50, {2, 16}, at::kLong),
                       targets_of = at::randint(50, {2, 16}, at::kLong);
      const NamedValues wanted = gradients_of_adapters(*model, tokens, targets_of);
      model->set_unit_runner([](const Unit& unit, const at::Tensor& x, bool) {
        return x.is_floating_point() && unit.name != plan::kHeadUnit
                   ? memory::recomputed(x, unit.forward, unit.draws, unit.again)
                   : unit.forward(x);
      });
      ASSERT_FALSE(wanted.empty());
      const NamedValues again = gradients_of_adapters(*model, tokens, targets_of);
      for (const auto& [name, gradient] : wanted)
        EXPECT_TRUE(at::equal(again.at(name), gradient)) << name << " " << plan::name(kind) << " " << dropout;
    }
  }
}

/// Norms and activations that are computed again, for A as for layers, give the same bits.
TEST_P(LowRankAdapters, LearnTheSameWhereCheapOutputsAreComputedAgain) {
  const auto [family, targets] = GetParam();
  for (const plan::AdapterKind kind : {plan::AdapterKind::kLora, plan::AdapterKind::kDora}) {
    const auto model = adapted_model(adapter_config(family, targets, kind));
    const at::Tensor tokens = at::randint(50, {2, 16}, at::kLong),
                     targets_of = at::randint(50, {2, 16}, at::kLong);
    const NamedValues wanted = gradients_of_adapters(*model, tokens, targets_of);
    model->recompute_cheap(1);
    const NamedValues again = gradients_of_adapters(*model, tokens, targets_of);
    ASSERT_FALSE(wanted.empty());
    for (const auto& [name, gradient] : wanted)
      EXPECT_TRUE(at::equal(again.at(name), gradient)) << name << " " << plan::name(kind);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LowRankAdapters,
                         ::testing::Values(std::tuple{plan::ModelFamily::kLlama, "all"},
                                           std::tuple{plan::ModelFamily::kLlama, "q_proj,v_proj"},
                                           std::tuple{plan::ModelFamily::kLlama, "o_proj,up_proj,down_proj"},
                                           std::tuple{plan::ModelFamily::kGpt2, "all"},
                                           std::tuple{plan::ModelFamily::kGpt2, "c_attn"},
                                           std::tuple{plan::ModelFamily::kGpt2, "c_fc,c_proj"}));

/// The gradient of what is passed on joins that of the product, whoever of the two is used.
TEST(TappedLinear, AddsTheGradientOfWhatItPassesOn) {
  const at::Tensor weight = at::randn({3, 8}).requires_grad_(), other = at::randn({8, 5});
  for (const bool reads_made : {true, false}) {
    for (const bool reads_passed : {true, false}) {
      if (!reads_made && !reads_passed) continue;
      const at::Tensor x = at::randn({2, 4, 8}).requires_grad_(), seen = x.detach().clone().requires_grad_();
      const Tapped tapped = tapped_linear(x * 1.0, weight);
      EXPECT_TRUE(at::equal(tapped.passed, x));
      at::Tensor sum = at::zeros({}), wanted = at::zeros({});
      if (reads_made) {
        sum = sum + tapped.made.square().sum();
        wanted = wanted + at::matmul(seen, weight.detach().t()).square().sum();
      }
      if (reads_passed) {
        sum = sum + at::matmul(tapped.passed, other).square().sum();
        wanted = wanted + at::matmul(seen, other).square().sum();
      }
      sum.backward();
      wanted.backward();
      expect_close_to(x.grad(), seen.grad(), "input");
    }
  }
}

/// Inputs without a gradient get none by being read beside trained weights.
TEST(TappedLinear, PassesOnWhatHasNoGradientAsItIs) {
  const at::Tensor weight = at::randn({3, 8}).requires_grad_(), norm = at::ones({8}), x = at::randn({4, 8});
  EXPECT_FALSE(tapped_linear(x, weight).passed.requires_grad());
  const TappedNorm tapped = tapped_norm_linear(x, {}, {norm, {}, 1e-5}, weight);
  EXPECT_FALSE(tapped.sum.requires_grad());
  EXPECT_FALSE(tapped.passed.requires_grad());
  EXPECT_FALSE(tapped_activated_linear(x, Activation::kGelu, weight).passed.requires_grad());
  EXPECT_TRUE(tapped.made.requires_grad());
}

TEST(LinearBlocks, MultiplyColumnsOfTheirOwn) {
  const at::Tensor first = at::randn({5, 2}).requires_grad_(), last = at::randn({3, 4}).requires_grad_(),
                   x = at::randn({2, 7, 6}).requires_grad_();
  const at::Tensor y = linear_blocks(x, {.weights = {{first, last}}, .first = {0, 9}, .width = 14});
  const at::Tensor wanted = at::cat({at::matmul(x.narrow(-1, 0, 2), first.t()), at::zeros({2, 7, 4}),
                                     at::matmul(x.narrow(-1, 2, 4), last.t()), at::zeros({2, 7, 2})},
                                    -1),
                   factor = at::randn({2, 7, 14});
  EXPECT_TRUE(at::allclose(y, wanted, 1e-5, 1e-6));
  const auto of_formula = torch::autograd::grad({(wanted * factor).sum()}, {x, first, last});
  (y * factor).sum().backward();
  expect_close_to(x.grad(), of_formula[0], "input");
  expect_close_to(first.grad(), of_formula[1], "first");
  expect_close_to(last.grad(), of_formula[2], "last");
}

/// How many hold a layer's input between forward and backward.
int64_t holders_of_input(bool trained) {
  const at::Tensor start = at::randn({4, 8}).requires_grad_(),
                   weight = at::randn({6, 8}).requires_grad_(trained);
  at::Tensor x = start * 2.0;
  const c10::Storage memory = x.storage();
  const at::Tensor y = linear(x, weight, at::Tensor());
  x.reset();
  const auto holders = static_cast<int64_t>(memory.use_count()) - 1;
  y.sum().backward();
  EXPECT_TRUE(at::allclose(start.grad(), 2.0 * weight.detach().sum(0).expand({4, 8}), 1e-5, 1e-6));
  return holders;
}

/// The gradient of the input needs the weights alone.
TEST(FrozenLinear, KeepsNoInputForBackward) {
  EXPECT_EQ(holders_of_input(/*trained=*/false), 0);
  EXPECT_GT(holders_of_input(/*trained=*/true), 0);
}

/// A layer of which the adapter alone computes something: scale x.
std::shared_ptr<Linear> layer_of_scale(int64_t width, double scale, double dropout) {
  const auto layer = std::make_shared<Linear>(width, width, false);
  layer->add_adapter({.rank = width, .scale = scale, .dropout = dropout});
  const at::NoGradGuard no_grad;
  layer->weight.zero_();
  for (at::Tensor matrix : layer->parameters())
    if (!matrix.is_same(layer->weight)) matrix.copy_(at::eye(width));
  return layer;
}

TEST(AdapterDropout, DropsAShareOfWhatTheAdapterReadsInTrainingAlone) {
  const auto layer = layer_of_scale(16, 2.0, 0.25);
  const at::Tensor x = at::randn({500, 16}).abs_().add_(0.1), wanted = 2.0 * x;
  const at::Tensor y = layer->forward(x), is_kept = y != 0;
  EXPECT_TRUE(at::allclose(y, at::where(is_kept, wanted / 0.75, at::zeros_like(x)), 1e-5, 1e-6));
  EXPECT_NEAR(is_kept.to(at::kDouble).mean().item<double>(), 0.75, 0.02);  // 8000 draws: four deviations
  layer->eval();
  EXPECT_TRUE(at::allclose(layer->forward(x), wanted, 1e-5, 1e-6));
}

TEST(AdapterDropout, ChangesNoMean) {
  const auto layer = layer_of_scale(16, 2.0, 0.25);
  const at::Tensor x = at::randn({4, 16});
  at::Tensor sum = at::zeros({4, 16}, at::kDouble);
  constexpr int64_t kSeeds = 4000;
  for (int64_t seed = 0; seed < kSeeds; ++seed) {
    at::manual_seed(static_cast<uint64_t>(seed));
    sum += layer->forward(x).detach();
  }
  // The deviation of a mean over the seeds is 2 |x| sqrt(p / (1 - p) / seeds) = 0.018 |x|.
  EXPECT_TRUE(at::allclose(sum / kSeeds, 2.0 * x.to(at::kDouble), 0.05, 1e-9));
}

TEST(AdapterDropout, LeavesTheLayerItselfAlone) {
  Linear layer(16, 8, false), plain(16, 8, false);
  layer.add_adapter({.rank = 4, .scale = 2.0, .dropout = 0.5});
  const at::NoGradGuard no_grad;
  for (at::Tensor matrix : layer.parameters()) matrix.normal_();
  layer.named_parameters()["lora_B.weight"].zero_();
  plain.weight.copy_(layer.weight);
  const at::Tensor x = at::randn({3, 16});
  EXPECT_TRUE(at::equal(layer.forward(x), plain.forward(x)));
}

TEST(AdapterDropout, DrawsNothingWhereItIsZero) {
  plan::ModelConfig config = adapter_config(plan::ModelFamily::kLlama, "all");
  const at::Tensor tokens = at::randint(50, {2, 16}, at::kLong);
  for (const double dropout : {0.0, 0.1}) {
    config.adapter.dropout = dropout;
    const auto model = adapted_model(config);
    const at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const at::Tensor before = generator.get_state();
    model->forward(tokens);
    EXPECT_EQ(at::equal(generator.get_state(), before), dropout == 0.0) << dropout;
  }
}

/// A layer whose rows have lengths of their own, and what it holds by name.
std::shared_ptr<Linear> layer_of_lengths(WeightLayout layout, bool with_bias, double dropout = 0.0) {
  const auto layer = std::make_shared<Linear>(12, 8, with_bias, layout);
  layer->add_adapter({.rank = 3, .scale = 1.5, .dropout = dropout, .lengths = true});
  const at::NoGradGuard no_grad;
  for (auto& [name, value] : values_of_module(*layer)) {
    at::Tensor parameter = value;
    parameter.normal_(0.0, name == "weight" ? 1.0 : 0.3);
    parameter.set_requires_grad(plan::is_of_adapter("." + name));
  }
  return layer;
}

/// Parameters that a formula of dense tensors is differentiated by.
struct DenseLengths {
  NamedValues values;
  at::Tensor w, a, b, m;  ///< W (out, in), A, B, and the lengths of rows

  DenseLengths(Linear& layer, WeightLayout layout) {
    for (const auto& [name, value] : values_of_module(layer))
      values[name] = value.detach().clone().set_requires_grad(value.requires_grad());
    w = layout == WeightLayout::kInOut ? values["weight"].t() : values["weight"];
    a = values["lora_A.weight"];
    b = values["lora_B.weight"];
    m = values["lora_magnitude_vector"] + w.norm(2, 1);
  }
  at::Tensor change() const { return 1.5 * at::matmul(b, a); }
  at::Tensor ratio() const { return m / (w + change()).norm(2, 1).detach(); }
};

void expect_same_gradients(Linear& layer, const NamedValues& wanted) {
  for (const auto& [name, value] : values_of_module(layer)) {
    ASSERT_EQ(value.grad().defined(), value.requires_grad()) << name;
    if (value.requires_grad()) expect_close_to(value.grad(), wanted.at(name).grad(), name);
  }
}

TEST(AdapterLengths, AreThoseOfTheRowsOfTheSumAndTheirNormHasNoGradient) {
  for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
    const auto layer = layer_of_lengths(layout, /*with_bias=*/true);
    const DenseLengths dense(*layer, layout);
    const at::Tensor x = at::randn({2, 5, 12}).requires_grad_(), seen = x.detach().clone().requires_grad_(),
                     residual = at::randn({2, 5, 8}), factor = at::randn({2, 5, 8});
    const at::Tensor y = layer->forward(x, residual);
    const at::Tensor wanted =
        at::matmul(seen, (dense.w + dense.change()).t()) * dense.ratio() + dense.values.at("bias") + residual;
    expect_close_to(y, wanted, "output");
    (y * factor).sum().backward();
    (wanted * factor).sum().backward();
    expect_close_to(x.grad(), seen.grad(), "input");
    expect_same_gradients(*layer, dense.values);
  }
}

/// As PEFT: the product that dropout does not reach is that of the layer without an adapter.
TEST(AdapterLengths, DropWhatChangesTheLayer) {
  const auto layer = layer_of_lengths(WeightLayout::kOutIn, /*with_bias=*/false, 0.4);
  const DenseLengths dense(*layer, WeightLayout::kOutIn);
  const at::Tensor x = at::randn({6, 12});
  at::manual_seed(3);
  const at::Tensor y = layer->forward(x);
  at::manual_seed(3);
  const at::Tensor seen = at::dropout(x, 0.4, true), ratio = dense.ratio();
  const at::Tensor wanted = at::matmul(x, dense.w.t()) + (ratio - 1.0) * at::matmul(seen, dense.w.t()) +
                            ratio * at::matmul(seen, dense.change().t());
  expect_close_to(y, wanted, "output");
  y.square().sum().backward();
  wanted.square().sum().backward();
  expect_same_gradients(*layer, dense.values);
}

TEST(AdapterLengths, OfLayersOnOneInputAreTheirOwn) {
  const auto first = layer_of_lengths(WeightLayout::kOutIn, false),
             last = layer_of_lengths(WeightLayout::kOutIn, false);
  const Linear plain(12, 4, false);
  plain.weight.detach().normal_();
  const at::Tensor x = at::randn({7, 12});
  const at::Tensor all = linear_group(x, std::vector<const Linear*>{first.get(), &plain, last.get()});
  expect_close_to(all, at::cat({first->forward(x), plain.forward(x), last->forward(x)}, -1), "outputs");
}

/// B begins at zero, and so does what is added to lengths.
TEST(LowRankAdapter, ChangesNothingAtFirst) {
  for (const plan::AdapterKind kind : {plan::AdapterKind::kLora, plan::AdapterKind::kDora}) {
    const plan::ModelConfig config = adapter_config(plan::ModelFamily::kLlama, "all", kind);
    plan::ModelConfig plain = config;
    plain.adapter = {};
    const auto model = build(config), without = build(plain);
    InitialWeights(config, 3).fill(*model);
    InitialWeights(plain, 3).fill(*without);
    const at::Tensor tokens = at::randint(50, {2, 16}, at::kLong), logits = model->forward(tokens);
    if (kind == plan::AdapterKind::kLora) {
      EXPECT_TRUE(at::equal(logits, without->forward(tokens)));
    }
    expect_close_to(logits, without->forward(tokens), "logits");
  }
}

}  // namespace
}  // namespace trireme::nn
