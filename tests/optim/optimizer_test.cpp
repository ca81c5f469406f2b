// Every optimizer against PyTorch's own, over flat ranges with gaps, with decay where a segment says so.
#include "trireme/optim/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/plan/optimizer.h"

namespace trireme::optim {
namespace {

constexpr double kLr = 1e-2, kScale = 0.5;

constexpr Group kNoDecay = {.decay_factor = 0.0};
/// Two ranges of one flat parameter; elements 20 to 23 are padding.
const std::vector<Segment> kSegments = {{{0, 12}}, {{12, 20}, kNoDecay}, {{24, 40}}};

plan::OptimConfig config_of(plan::OptimizerName name) {
  return {
      .name = name, .lr = kLr, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .momentum = 0.7, .weight_decay = 0.3};
}

/// torch's optimizer over copies of the segments, decayed ones in one group and the others in another.
std::unique_ptr<torch::optim::Optimizer> make_peer(const plan::OptimConfig& config,
                                                   const std::vector<at::Tensor>& parts) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    const double decay = config.weight_decay * kSegments[i].group.decay_factor;
    std::unique_ptr<torch::optim::OptimizerOptions> options;
    if (config.name == plan::OptimizerName::kSgd) {
      options = std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(kLr)
                                                               .momentum(config.momentum)
                                                               .nesterov(config.nesterov)
                                                               .weight_decay(decay));
    } else {
      options = std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(kLr)
                                                                 .betas({config.beta1, config.beta2})
                                                                 .eps(config.eps)
                                                                 .weight_decay(decay));
    }
    groups.emplace_back(std::vector<at::Tensor>{parts[i]}, std::move(options));
  }
  if (config.name == plan::OptimizerName::kSgd) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(kLr));
  }
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(kLr));
}

class EveryOptimizer : public ::testing::TestWithParam<plan::OptimizerName> {};

void expect_pytorchs_steps(const plan::OptimConfig& config) {
  FlatParam param{.master = at::randn({40}), .grad = at::zeros({40}), .copy = {}, .segments = kSegments};
  param.copy = param.master.to(at::kBFloat16);
  const at::Tensor before = param.master.clone();
  std::vector<at::Tensor> parts;
  for (const Segment& segment : kSegments)
    parts.push_back(part_of(before, segment).to(at::kDouble).requires_grad_());
  const auto ours = build(config, {param});
  const auto peer = make_peer(config, parts);
  for (int step = 0; step < 10; ++step) {
    param.grad.copy_(at::randn({40}));
    for (size_t i = 0; i < parts.size(); ++i)
      parts[i].mutable_grad() = part_of(param.grad, kSegments[i]).to(at::kDouble) * kScale;
    ours->step(kScale);
    peer->step();
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor got = part_of(param.master, kSegments[i]);
    // One rounding to fp32 a step.
    EXPECT_LT((got.to(at::kDouble) - parts[i].detach()).abs().max().item<double>(), 10 * 4 * 0x1p-24) << i;
    EXPECT_TRUE(at::equal(part_of(param.copy, kSegments[i]), got.to(at::kBFloat16))) << i;
  }
  const Segment padding{{20, 24}};
  EXPECT_TRUE(at::equal(part_of(param.master, padding), part_of(before, padding)));
}

TEST_P(EveryOptimizer, TakesTheStepsThatPyTorchTakes) {
  expect_pytorchs_steps(config_of(GetParam()));
}

TEST(Sgd, TakesTheStepsThatPyTorchTakesWithNesterovsMomentum) {
  plan::OptimConfig config = config_of(plan::OptimizerName::kSgd);
  config.nesterov = true;
  expect_pytorchs_steps(config);
}

TEST_P(EveryOptimizer, HoldsTheStateOfItsRecord) {
  const FlatParam param{
      .master = at::zeros({40}), .grad = at::zeros({40}), .copy = {}, .segments = kSegments};
  const auto optimizer = build(config_of(GetParam()), {param, param});
  const auto tensors = static_cast<int64_t>(plan::record_of(GetParam()).state.size());
  EXPECT_EQ(optimizer->state_bytes(), 2 * tensors * 40 * 4);
}

TEST_P(EveryOptimizer, UpdatesParametersInAnyOrder) {
  const auto trained = [&](bool reversed) {
    at::manual_seed(3);
    std::vector<FlatParam> params;
    for (int i = 0; i < 3; ++i)
      params.push_back(
          {.master = at::randn({8}), .grad = at::randn({8}), .copy = {}, .segments = {{{0, 8}}}});
    const auto optimizer = build(config_of(GetParam()), params);
    for (int step = 0; step < 3; ++step) {
      optimizer->begin_step();
      for (size_t i = 0; i < 3; ++i) optimizer->update(reversed ? 2 - i : i, kScale);
    }
    return at::stack({params[0].master, params[1].master, params[2].master});
  };
  EXPECT_TRUE(at::equal(trained(false), trained(true)));
}

TEST_P(EveryOptimizer, MultipliesGradientsByAScaleOnTheDeviceAsWell) {
  const at::Tensor start = at::randn({40}), gradient = at::randn({40});
  const auto trained = [&](double host, const at::Tensor& device) {
    const FlatParam param{.master = start.clone(), .grad = gradient, .copy = {}, .segments = kSegments};
    const auto optimizer = build(config_of(GetParam()), {param});
    GradScale scale = host;
    scale.device = device;
    for (int step = 0; step < 2; ++step) optimizer->step(scale);
    return param.master;
  };
  // Powers of two: the order of the factors rounds nothing.
  EXPECT_TRUE(at::equal(trained(0.5, at::scalar_tensor(0.25, at::kFloat)), trained(0.125, {})));
}

TEST_P(EveryOptimizer, RefusesACopyInFp16OnACpu) {
  const at::Tensor master = at::randn({40});
  const auto optimizer = build(
      config_of(GetParam()),
      {{.master = master, .grad = at::randn({40}), .copy = master.to(at::kHalf), .segments = kSegments}});
  test::expect_refusal([&] { optimizer->step(); }, {"copy", "Half", "BFloat16"});
}

INSTANTIATE_TEST_SUITE_P(Optimizers, EveryOptimizer,
                         ::testing::ValuesIn(plan::all_values<plan::OptimizerName>()),
                         [](const auto& optimizer) { return std::string(plan::name(optimizer.param)); });

TEST(Sgd, RefusesNesterovsMomentumWithoutMomentum) {
  EXPECT_THROW(sgd({}, {.nesterov = true}), ConfigError);
}

TEST_P(EveryOptimizer, AveragesParametersOverStepsWhenAsked) {
  plan::OptimConfig config = config_of(GetParam());
  config.ema = 0.9;
  const FlatParam param{
      .master = at::randn({40}), .grad = at::zeros({40}), .copy = {}, .segments = kSegments};
  const auto optimizer = build(config, {param});
  at::Tensor expected;
  for (int step = 0; step < 5; ++step) {
    param.grad.normal_();
    optimizer->step();
    const at::Tensor now = param.master.to(at::kDouble);
    expected = step == 0 ? now : 0.9 * expected + 0.1 * now;
  }
  const size_t number = plan::record_of(GetParam()).state.size();
  ASSERT_EQ(optimizer->state_names().size(), number + 1);
  EXPECT_EQ(optimizer->state_names().back(), plan::kAverageState);
  const at::Tensor averages = optimizer->state(0, number, {0, 40});
  for (const Segment& segment : kSegments) {
    const at::Tensor got = part_of(averages, segment).to(at::kDouble);
    EXPECT_LT((got - part_of(expected, segment)).abs().max().item<double>(), 5 * 4 * 0x1p-24);
  }
}

TEST_P(EveryOptimizer, AveragesAnElementToTheSameBitsWhereverItLies) {
  plan::OptimConfig config = config_of(GetParam());
  config.ema = 0.99;
  const at::Tensor start = at::randn({37}), gradient = at::randn({37});
  const auto averages = [&](const std::vector<Segment>& segments) {
    const FlatParam param{.master = start.clone(), .grad = gradient, .copy = {}, .segments = segments};
    const auto optimizer = build(config, {param});
    for (int step = 0; step < 4; ++step) optimizer->step();
    return optimizer->state(0, optimizer->state_names().size() - 1, {0, 37}).clone();
  };
  const at::Tensor whole = averages({{{0, 37}}});
  at::Tensor apart = at::empty({37});
  for (int64_t i = 0; i < 37; ++i) apart[i] = averages({{{i, i + 1}}})[i];
  EXPECT_TRUE(at::equal(whole, apart));
}

TEST(Build, RefusesOptimizersWithoutAFactory) {
  EXPECT_THROW(build({.name = static_cast<plan::OptimizerName>(99)}, {}), LogicError);
}

TEST(Segments, NeighboursThatAreTreatedAlikeBecomeOne) {
  const std::vector<Segment> joined = merged({{{0, 4}}, {{4, 8}}, {{8, 12}, kNoDecay}, {{16, 20}, kNoDecay}});
  ASSERT_EQ(joined.size(), 3u);
  EXPECT_EQ(joined[0].range.end, 8);
  EXPECT_EQ(joined[1].range.begin, 8);
  EXPECT_EQ(joined[2].range.begin, 16) << "a gap stays one";
}

}  // namespace
}  // namespace trireme::optim
