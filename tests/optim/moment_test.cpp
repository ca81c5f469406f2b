// Optimizer state in fewer bits than fp32: what rounding at random promises, and that an element's state does
// not depend on how its parameter is cut.
#include "trireme/kernels/moment.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/optim/optimizer.h"

namespace trireme::optim {
namespace {

using kernels::kMomentBlock;
using kernels::Moment;
using kernels::MomentBits;
using kernels::MomentFormat;
using kernels::MomentKind;

constexpr MomentKind kKinds[] = {MomentKind::kSigned, MomentKind::kSquares};
constexpr MomentFormat kFormats[] = {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8};

struct Block {
  float x[kMomentBlock];
};

/// Magnitudes over some octaves, as neighbours in a parameter have them.
Block random_block(uint64_t seed, double octaves, bool negative) {
  const at::Tensor numbers =
      at::exp2((at::rand({kMomentBlock}, at::kDouble) - 0.5) * octaves + 10.0 * std::sin(seed)) *
      (negative ? at::randn({kMomentBlock}).sign() : at::ones({kMomentBlock}));
  Block block;
  for (int i = 0; i < kMomentBlock; ++i) block.x[i] = numbers[i].item<float>();
  return block;
}

/// What memory holds after x was written: numbers for kSigned, roots for kSquares.
Block after(const Block& block, MomentKind kind, const MomentBits& bits) {
  int8_t values[kMomentBlock];
  const uint8_t exponent = kernels::to_moment_int8(block.x, values, kind, bits);
  Block result;
  for (int i = 0; i < kMomentBlock; ++i) result.x[i] = kernels::from_moment_int8(values[i], exponent);
  return result;
}

float largest_of(const Block& block) {
  float most = 0.0f;
  for (const float x : block.x) most = std::max(most, std::abs(x));
  return most;
}

TEST(MomentInt8, IsANeighbourAndRightOnAverage) {
  at::manual_seed(1);
  constexpr int kRounds = 20000;
  for (int seed = 0; seed < 20; ++seed) {
    const Block block = random_block(seed, 6.0, true);
    const double unit = largest_of(block) / 63.5;  // or half of it
    double sum[kMomentBlock] = {};
    for (int round = 0; round < kRounds; ++round) {
      const Block got = after(block, MomentKind::kSigned, MomentBits(seed, round, 0));
      for (int i = 0; i < kMomentBlock; ++i) {
        ASSERT_LT(std::abs(got.x[i] - block.x[i]), unit);
        sum[i] += got.x[i];
      }
    }
    for (int i = 0; i < kMomentBlock; ++i)  // four deviations of a coin's mean
      EXPECT_NEAR(sum[i] / kRounds, block.x[i], 4.0 * 0.5 * unit / std::sqrt(kRounds)) << seed << " " << i;
  }
}

TEST(MomentInt8, LeavesWhatItHasReadAsItIs) {
  at::manual_seed(2);
  for (const MomentKind kind : kKinds) {
    for (int seed = 0; seed < 300; ++seed) {
      const Block first =
          after(random_block(seed, 16.0, kind == MomentKind::kSigned), kind, MomentBits(1, seed, 0));
      const Block second = after(first, kind, MomentBits(2, seed, 1));
      for (int i = 0; i < kMomentBlock; ++i) ASSERT_EQ(second.x[i], first.x[i]) << seed << " " << i;
    }
  }
}

TEST(MomentInt8, NoSumOfSquaresBecomesZero) {
  Block block{{1e3f, 1e-3f, 1e-9f, 0.0f, 1e2f, 5.0f, 1e-20f, 1e3f}};
  for (int round = 0; round < 100; ++round) {
    const Block got = after(block, MomentKind::kSquares, MomentBits(3, round, 0));
    for (int i = 0; i < kMomentBlock; ++i) EXPECT_EQ(got.x[i] > 0.0f, block.x[i] > 0.0f) << i;
  }
}

TEST(MomentInt8, TakesTheWholeRangeOfFp32) {
  const float most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  for (const float x : {most, 1e30f, 1e-30f}) {
    const Block got = after({{x, -x, 0.0f, x, -x, x, x, x}}, MomentKind::kSigned, MomentBits(4, 0, 0));
    EXPECT_NEAR(got.x[0] / x, 1.0, 1.0 / 127.0) << x;
    EXPECT_NEAR(got.x[1] / x, -1.0, 1.0 / 63.0) << x;
    EXPECT_EQ(got.x[2], 0.0f);
  }
  EXPECT_LT(after({{least}}, MomentKind::kSigned, MomentBits(4, 0, 0)).x[0], 1e-36f);
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    const Block got = after({{1.0f, bad}}, MomentKind::kSigned, MomentBits(4, 0, 0));
    EXPECT_TRUE(std::isnan(got.x[0]) && std::isnan(got.x[1])) << bad;
  }
}

TEST(MomentBf16, IsANeighbourAndRightOnAverage) {
  const auto after_bf16 = [](float x, uint32_t bits) {
    return kernels::from_moment_bf16(kernels::to_moment_bf16(x, bits));
  };
  for (const float x : {1.0f + 1.0f / 1024.0f, -3.14159f, 1e-20f * 1.7f}) {
    double sum = 0.0;
    for (uint32_t bits = 0; bits < 65536; ++bits) sum += after_bf16(x, bits);
    EXPECT_NEAR(sum / 65536.0 / x, 1.0, 1e-7) << x;
  }
  for (const float x : {0.0f, 1.5f, -HUGE_VALF}) {
    for (const uint32_t bits : {0u, 1u, 0x8000u, 0xffffu}) EXPECT_EQ(after_bf16(x, bits), x);
  }
  EXPECT_TRUE(std::isnan(after_bf16(std::bit_cast<float>(0x7fffffffu), 0xffffu)));
}

TEST(MomentTest, ReadsWhatItWroteInEveryFormat) {
  at::manual_seed(3);
  for (const MomentFormat format : kFormats) {
    for (const MomentKind kind : kKinds) {
      for (const int64_t count : {0, 1, 8, 61, 4096}) {
        const Moment moment(count, format, kind, at::kCPU);
        EXPECT_EQ(moment.read().abs().sum().item<double>(), 0.0);
        const at::Tensor x = at::randn({count}), values = kind == MomentKind::kSquares ? x.square() : x;
        moment.write(values);
        const at::Tensor got = moment.read();
        const double bound = format == MomentFormat::kFp32   ? 0.0
                             : format == MomentFormat::kBf16 ? 1.0 / 256
                                                             : 0.2;
        if (count > 0) {
          EXPECT_LE((got - values).norm().item<double>(), bound * values.norm().item<double>());
        }
        moment.write(got);
        EXPECT_TRUE(at::equal(moment.read(), got)) << count;
        if (count < 61) continue;
        const Moment part = moment.part(16, 61);
        EXPECT_TRUE(at::equal(part.read(), got.slice(0, 16, 61)));
        part.write(at::zeros({45}));
        EXPECT_TRUE(at::equal(moment.read().slice(0, 0, 16), got.slice(0, 0, 16)));
        EXPECT_EQ(moment.read().slice(0, 16, 61).abs().sum().item<double>(), 0.0);
      }
    }
  }
  EXPECT_EQ(Moment(64, MomentFormat::kInt8, MomentKind::kSigned, at::kCPU).bytes(), 64 + 8);
  EXPECT_THROW(Moment(64, MomentFormat::kBf16, MomentKind::kSigned, at::kCPU).part(4, 8), LogicError);
}

class EveryState : public ::testing::TestWithParam<std::tuple<plan::OptimizerName, plan::OptimState>> {
 protected:
  plan::OptimConfig config() const {
    return {
        .name = std::get<0>(GetParam()), .state = std::get<1>(GetParam()), .lr = 1e-2, .weight_decay = 0.0};
  }
};

/// Weights of a linear model from noisy observations of it: the error is that of fp32 state.
TEST_P(EveryState, ConvergesAsFp32Does) {
  constexpr int64_t kSize = 200;
  const auto error_of = [&](const plan::OptimConfig& config) {
    at::manual_seed(5);
    const at::Tensor truth = at::randn({kSize});
    const FlatParam param{
        .master = at::zeros({kSize}), .grad = at::zeros({kSize}), .copy = {}, .segments = {{{0, kSize}}}};
    const auto optimizer = build(config, {param});
    for (int step = 0; step < 1500; ++step) {
      const at::Tensor x = at::randn({32, kSize});
      const at::Tensor residual = at::mv(x, param.master - truth) + 0.1 * at::randn({32});
      param.grad.copy_(at::mv(x.t(), residual) / 32.0);
      optimizer->set_lr(config.lr * (1.0 - step / 1500.0));
      optimizer->step();
    }
    return ((param.master - truth).norm() / truth.norm()).item<double>();
  };
  plan::OptimConfig fp32 = config();
  fp32.state = plan::OptimState::kFp32;
  const double wanted = error_of(fp32);
  EXPECT_LT(wanted, 0.05) << "the run must have learnt something";
  EXPECT_LT(error_of(config()), 1.2 * wanted);
}

/// With beta2 near 1 what a step adds is below half a unit in the last place: rounded to nearest, the average
/// of squares would stay where the first large gradients have left it.
TEST_P(EveryState, SmallChangesAreNotLost) {
  plan::OptimConfig config = this->config();
  config.lr = 0.0;
  config.beta1 = config.momentum = 0.999;
  config.beta2 = 0.999;
  constexpr int64_t kSize = 4096;
  const FlatParam param{
      .master = at::zeros({kSize}), .grad = at::ones({kSize}), .copy = {}, .segments = {{{0, kSize}}}};
  const auto optimizer = build(config, {param});
  for (int step = 0; step < 200; ++step) optimizer->step();
  param.grad.zero_();
  for (int step = 0; step < 2000; ++step) optimizer->step();
  const bool adamw = config.name == plan::OptimizerName::kAdamW;
  const double decayed = std::pow(0.999, 2000.0);
  const double first = (adamw ? 1.0 : 1000.0) * (1.0 - std::pow(0.999, 200.0)) * decayed;
  EXPECT_NEAR(optimizer->state(0, 0, {0, kSize}).mean().item<double>(), first, 0.03 * first);
  if (adamw) {
    EXPECT_NEAR(optimizer->state(0, 1, {0, kSize}).mean().item<double>(), first, 0.05 * first);
  }
}

TEST_P(EveryState, AveragesOfParametersChangeNoBit) {
  constexpr int64_t kSize = 333;
  const auto trained = [&](double ema) {
    at::manual_seed(7);
    plan::OptimConfig config = this->config();
    config.ema = ema;
    const FlatParam param{.master = at::randn({kSize}),
                          .grad = at::zeros({kSize}),
                          .copy = {},
                          .segments = {{.range = {0, kSize}, .key = 5}}};
    const auto optimizer = build(config, {param});
    for (int step = 0; step < 5; ++step) {
      param.grad.copy_(at::randn({kSize}));
      optimizer->step();
    }
    return param.master;
  };
  EXPECT_TRUE(at::equal(trained(0.0), trained(0.9)));
}

TEST_P(EveryState, AnElementIsTheSameHoweverItsParameterIsCut) {
  constexpr int64_t kSize = 85;
  at::manual_seed(6);
  const at::Tensor start = at::randn({kSize});
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < 6; ++step) gradients.push_back(at::randn({kSize}));
  // Each part is a buffer of its own, as a rank's shard is.
  const auto trained = [&](const std::vector<int64_t>& cuts) {
    std::vector<FlatParam> params;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t size = cuts[i + 1] - cuts[i];
      params.push_back({.master = start.slice(0, cuts[i], cuts[i + 1]).clone(),
                        .grad = at::zeros({size}),
                        .copy = at::zeros({size}, at::kBFloat16),
                        .segments = {{.range = {0, size}, .key = 77, .first = cuts[i]}}});
    }
    const auto optimizer = build(config(), params);
    for (const at::Tensor& gradient : gradients) {
      for (size_t i = 0; i < params.size(); ++i)
        params[i].grad.copy_(gradient.slice(0, cuts[i], cuts[i + 1]));
      optimizer->step();
    }
    std::vector<at::Tensor> all;
    for (size_t i = 0; i < params.size(); ++i) {
      all.push_back(params[i].master);
      for (size_t n = 0; n < optimizer->state_names().size(); ++n)
        all.back() = at::cat({all.back().reshape({-1, params[i].master.numel()}),
                              optimizer->state(i, n, {0, params[i].master.numel()}).unsqueeze(0)});
    }
    return at::cat(all, 1);
  };
  const at::Tensor whole = trained({0, kSize});
  EXPECT_TRUE(at::equal(trained({0, 8, 40, kSize}), whole));
  EXPECT_TRUE(at::equal(trained({0, 80, kSize}), whole));
}

TEST_P(EveryState, RefusesPartsThatBeginInsideABlock) {
  const FlatParam param{
      .master = at::zeros({40}), .grad = at::zeros({40}), .copy = {}, .segments = {{{0, 4}}, {{4, 40}}}};
  if (config().state == plan::OptimState::kFp32) {
    EXPECT_NO_THROW(build(config(), {param}));
  } else {
    EXPECT_THROW(build(config(), {param}), LogicError);
  }
}

INSTANTIATE_TEST_SUITE_P(States, EveryState,
                         ::testing::Combine(::testing::ValuesIn(plan::all_values<plan::OptimizerName>()),
                                            ::testing::ValuesIn(plan::all_values<plan::OptimState>())),
                         [](const auto& named) {
                           return std::string(plan::name(std::get<0>(named.param))) + "_" +
                                  std::string(plan::name(std::get<1>(named.param)));
                         });

}  // namespace
}  // namespace trireme::optim
