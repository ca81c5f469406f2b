// Casts to FP8 and their products against values that are found by search, and layers and models in FP8
// against bf16: forward, every gradient, recomputed and deferred.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/nn/fp8_models.h"
#include "tests/support/fp8_cases.h"
#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/loss.h"

namespace trireme::nn {
namespace {

using kernels::Fp8Cast;
using kernels::Fp8Copies;
using kernels::Fp8Format;
using kernels::Fp8Matrix;
using kernels::Fp8Scaling;
using kernels::Fp8Span;

/// The values of all codes of a format, by its definition: sign, exponent with bias, fraction; nearest to x,
/// of two equally near the one with an even code.
class Codes {
 public:
  explicit Codes(Fp8Format format) {
    const int fraction_bits = format == Fp8Format::kE4m3 ? 3 : 2, exponent_bits = 7 - fraction_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
      const double share = static_cast<double>(fraction) / (1 << fraction_bits);
      const double value =
          exponent == 0 ? std::ldexp(share, 1 - bias) : std::ldexp(1.0 + share, exponent - bias);
      if (value <= kernels::largest(format)) values_.push_back(value);
    }
  }

  double nearest(double x) const {
    const double magnitude = std::abs(x);
    size_t best = 0;
    for (size_t code = 1; code < values_.size(); ++code) {
      const double now = std::abs(values_[code] - magnitude), before = std::abs(values_[best] - magnitude);
      if (now < before || (now == before && code % 2 == 0)) best = code;
    }
    return std::copysign(values_[best], x);
  }

 private:
  std::vector<double> values_;
};

/// The elements that share the scale of (row, column).
at::Tensor span_around(const at::Tensor& x, Fp8Span span, int64_t row, int64_t column) {
  constexpr int64_t kSide = kernels::kFp8Block;
  const int64_t top = row / kSide * kSide, left = column / kSide * kSide;
  switch (span) {
    case Fp8Span::kTensor:
      return x;
    case Fp8Span::kRow:
      return x.narrow(0, row, 1);
    case Fp8Span::kRowBlock:
      return x.narrow(0, row, 1).narrow(1, left, kSide);
    case Fp8Span::kSquareBlock:
      break;
  }
  return x.narrow(0, top, kSide).narrow(1, left, kSide);
}

float scale_at(const Fp8Matrix& matrix, int64_t row, int64_t column) {
  constexpr int64_t kSide = kernels::kFp8Block;
  const at::Tensor& scale = matrix.scale;
  switch (matrix.span) {
    case Fp8Span::kTensor:
      return scale.item<float>();
    case Fp8Span::kRow:
      return scale[row].item<float>();
    case Fp8Span::kRowBlock:
      return scale[column / kSide][row].item<float>();
    case Fp8Span::kSquareBlock:
      break;
  }
  return scale[row / kSide][column / kSide].item<float>();
}

/// Some elements of the cast of `x`, by definition.
void expect_cast(const Fp8Matrix& got, const at::Tensor& x, Fp8Format format, const std::string& what) {
  ASSERT_EQ(got.values.sizes(), x.sizes()) << what;
  const Codes codes(format);
  const at::Tensor exact = x.to(at::kFloat), values = got.values.to(at::kFloat);
  const float most = kernels::largest(format);
  for (int64_t i = 0; i < x.numel(); i += 97) {
    const int64_t row = i / x.size(1), column = i % x.size(1);
    const float amax = span_around(exact, got.span, row, column).abs().max().item<float>();
    EXPECT_EQ(scale_at(got, row, column), amax / most) << what << ", " << row << " " << column;
    EXPECT_EQ(values[row][column].item<float>(),
              codes.nearest(exact[row][column].item<float>() * (most / amax)))
        << what << ", " << row << " " << column;
  }
}

TEST(Fp8Casts, AreTheNearestValuesOfTheScaledMatrixBothWaysRound) {
  for (const test::Fp8Case& one : test::fp8_casts()) {
    const at::Tensor x = test::wide_values(256, 384, 5);
    const Fp8Copies copies = fp8_cast(x, fp8_amax(x, one.cast.scaling), one.cast);
    expect_cast(copies.plain, x, one.cast.format, one.name + " plain");
    expect_cast(copies.transposed, x.t().contiguous(), one.cast.format, one.name + " transposed");
  }
}

TEST(Fp8Casts, NoValueIsTooSmallOrTooLarge) {
  for (const test::Fp8Case& one : test::fp8_casts()) {
    const auto options = at::TensorOptions().dtype(at::kBFloat16);
    const auto dequantized_cast = [&](const at::Tensor& x) {
      const Fp8Copies copies = fp8_cast(x, fp8_amax(x, one.cast.scaling), one.cast);
      return std::pair(dequantized(copies.plain), dequantized(copies.transposed));
    };
    const auto [zeros, zeros_turned] = dequantized_cast(at::zeros({128, 128}, options));
    EXPECT_EQ(zeros.abs().max().item<float>(), 0.0f) << one.name;
    EXPECT_EQ(zeros_turned.abs().max().item<float>(), 0.0f) << one.name;
    for (const double size : {1e-38, 1e-20, 1.0, 1e38}) {
      const at::Tensor x = at::full({128, 128}, size, options);
      const auto [plain, turned] = dequantized_cast(x);
      const double wanted = x[0][0].item<double>();
      const double tolerance = size < kernels::kSmallestAmax ? kernels::kSmallestAmax : 1e-6 * wanted;
      EXPECT_NEAR(plain.max().item<double>(), wanted, tolerance) << one.name;
      EXPECT_NEAR(turned.min().item<double>(), wanted, tolerance) << one.name;
    }
    for (const double bad : {std::nan(""), HUGE_VAL}) {
      at::Tensor x = at::ones({128, 128}, options);
      x[3][4].fill_(bad);
      const auto [plain, turned] = dequantized_cast(x);
      EXPECT_FALSE(std::isfinite(plain[3][4].item<double>())) << one.name;
      EXPECT_FALSE(std::isfinite(turned[4][3].item<double>())) << one.name;
    }
  }
}

/// Of an earlier step: smaller and larger than what is cast.
TEST(Fp8Casts, ByAnotherMagnitudeSaturateAndSayWhatTheySaw) {
  for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
    const Fp8Cast cast{.format = format};
    const at::Tensor x = test::wide_values(64, 96, 5), own = fp8_amax(x, Fp8Scaling::kTensor);
    for (const double factor : {0.25, 1.0, 8.0}) {
      const at::Tensor amax = own * factor, seen = at::zeros({1});
      const Fp8Copies got = fp8_cast(x, amax, cast, kernels::Fp8Copy::kBoth, seen);
      EXPECT_TRUE(at::equal(seen, own));
      const float most = amax.item<float>();
      const Fp8Copies wanted = fp8_cast(x.to(at::kFloat).clamp(-most, most).to(at::kBFloat16), amax, cast);
      EXPECT_TRUE(at::equal(dequantized(got.plain), dequantized(wanted.plain))) << factor;
      EXPECT_TRUE(at::equal(dequantized(got.transposed), dequantized(wanted.transposed))) << factor;
    }
    const at::Tensor larger = own * 2.0;
    fp8_cast(x, own, cast, kernels::Fp8Copy::kBoth, larger);
    EXPECT_TRUE(at::equal(larger, own * 2.0)) << "what another cast saw is larger";
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      at::Tensor y = x.clone(), seen = at::zeros({1});
      y[3][4].fill_(bad);
      const Fp8Copies got = fp8_cast(y, own, cast, kernels::Fp8Copy::kBoth, seen);
      EXPECT_TRUE(std::isnan(dequantized(got.plain)[3][4].item<double>()));
      EXPECT_TRUE(std::isnan(dequantized(got.transposed)[4][3].item<double>()));
      EXPECT_FALSE(std::isfinite(seen.item<double>()));
    }
  }
}

TEST(Fp8Casts, OfSwigluAreThoseOfItsValues) {
  const at::Tensor gate_up = test::wide_values(128, 512, 5), dy = test::wide_values(128, 256, 6);
  const auto check = [](const kernels::Fp8Source& source, const Fp8Cast& cast, const std::string& what) {
    const at::Tensor values = source.computed();
    const bool tensor = cast.scaling == Fp8Scaling::kTensor;
    const at::Tensor amax = fp8_amax(values, cast.scaling), seen = tensor ? at::zeros({1}) : at::Tensor();
    const Fp8Copies got = fp8_cast(source, amax, cast, kernels::Fp8Copy::kBoth, seen);
    const Fp8Copies wanted = fp8_cast(values, amax, cast);
    EXPECT_TRUE(at::equal(dequantized(got.plain), dequantized(wanted.plain))) << what;
    EXPECT_TRUE(at::equal(dequantized(got.transposed), dequantized(wanted.transposed))) << what;
    EXPECT_THROW(fp8_cast(source, fp8_amax(values, Fp8Scaling::kRow), {.scaling = Fp8Scaling::kRow}),
                 LogicError);
    EXPECT_THROW(fp8_cast(source, fp8_amax(values, Fp8Scaling::kTensor), {}), LogicError)
        << "nothing was seen";
  };
  for (const Fp8Scaling scaling : {Fp8Scaling::kTensor, Fp8Scaling::kBlock}) {
    check(kernels::Fp8Source::swiglu(gate_up), {.scaling = scaling}, "forward");
    check(kernels::Fp8Source::swiglu_gradient(gate_up, dy), {.scaling = scaling}, "backward");
  }
}

TEST(Fp8Casts, RefuseWhatTheyCannotTake) {
  const auto bf16 = at::TensorOptions().dtype(at::kBFloat16);
  EXPECT_THROW(kernels::fp8_amax(at::ones({16, 16}), Fp8Scaling::kTensor), LogicError);
  EXPECT_THROW(kernels::fp8_amax(at::ones({16, 24}, bf16), Fp8Scaling::kTensor), LogicError);
  EXPECT_THROW(kernels::fp8_amax(at::ones({24, 16}, bf16), Fp8Scaling::kRow), LogicError);
  EXPECT_THROW(kernels::fp8_cast(at::ones({16, 128}, bf16), {}, {.scaling = Fp8Scaling::kBlock}), LogicError);
  EXPECT_THROW(kernels::fp8_amax(at::ones({16, 32}, bf16).t(), Fp8Scaling::kTensor), LogicError);
}

TEST(Fp8Products, AreThoseOfTheValuesTheyStandFor) {
  for (const test::Fp8Product& one : test::fp8_products()) {
    const test::Fp8Operands operands = test::operands_of(one, 128, 256, 384);
    const at::Tensor exact =
        dequantized(operands.a).to(at::kDouble).mm(dequantized(operands.b).to(at::kDouble).t());
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      const at::Tensor addend = at::randn({128, 256}).to(dtype);
      at::Tensor out = at::empty({128, 256}, addend.options()), sum = addend.clone();
      fp8_matmul(out, operands.a, operands.b, true);
      test::expect_near_product(out, exact, one.name);
      fp8_matmul(sum, operands.a, operands.b, true, {}, sum);
      test::expect_near_product(sum, exact + addend.to(at::kDouble), one.name + " in place");
      if (dtype == at::kFloat) continue;
      const at::Tensor bias = at::randn({256}).to(dtype);
      fp8_matmul(out, operands.a, operands.b, false, bias, addend);
      test::expect_near_product(out, exact + bias.to(at::kDouble) + addend.to(at::kDouble),
                                one.name + " with bias and addend");
    }
  }
}

/// Rounding to e5m2 moves a value by at most 1/8, by 1/14 on average.
constexpr double kHeadDistance = 0.12;

/// Rounding to e4m3 moves a value by at most 1/16, by 1/28 on average; products of noise keep about that.
constexpr double kFp8Distance = 0.06;

TEST(Fp8Linear, OutputAndGradientsAreNearThoseOfBf16InBothLayouts) {
  for (const Fp8Recipe& recipe : test::fp8_recipes()) {
    for (const WeightLayout layout : {WeightLayout::kOutIn, WeightLayout::kInOut}) {
      const auto leaf = [](at::IntArrayRef sizes) {
        return at::randn(sizes).to(at::kBFloat16).requires_grad_();
      };
      at::manual_seed(3);
      const bool out_in = layout == WeightLayout::kOutIn;
      const at::Tensor x = leaf({2, 128, 256}), residual = leaf({2, 128, 384}), bias = leaf({384});
      const at::Tensor weight = out_in ? leaf({384, 256}) : leaf({256, 384});
      const at::Tensor dy = at::randn({2, 128, 384}).to(at::kBFloat16);
      const auto results = [&](const std::optional<Fp8Recipe>& fp8) {
        for (const at::Tensor& one : {x, residual, bias, weight}) one.mutable_grad() = at::Tensor();
        const at::Tensor y = linear(x, weight, bias, layout, residual, fp8);
        y.backward(dy);
        return std::vector<at::Tensor>{y.detach(), x.grad(), weight.grad(), bias.grad(), residual.grad()};
      };
      const auto wanted = results({}), got = results(recipe);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_LT(test::relative_error(got[i], wanted[i]), kFp8Distance) << i << " in_out " << !out_in;
        EXPECT_GT(test::relative_error(got[i], wanted[i]), 1e-3) << i << ": that is no FP8";
      }
      EXPECT_TRUE(at::equal(got[3], wanted[3])) << "of the bias, which no product is part of";
      EXPECT_TRUE(at::equal(got[4], wanted[4])) << "of the residual";
    }
  }
}

// Targets are what a model has half learned, so that rows have one large gradient and many small ones.
TEST(Fp8Head, LossAndGradientsAreNearThoseOfBf16) {
  for (const Fp8Recipe& recipe : test::fp8_recipes()) {
    for (const int64_t classes : {256, 1000}) {
      at::manual_seed(5);
      const auto leaf = [](const at::Tensor& values) { return values.to(at::kBFloat16).requires_grad_(); };
      const at::Tensor x = leaf(at::randn({2, 192, 128})), weight = leaf(0.2 * at::randn({classes, 128}));
      at::Tensor targets = at::matmul(x.detach(), weight.detach().t()).argmax(-1);
      targets.flatten().slice(0, 0, {}, 2).random_(0, classes);
      targets.select(1, 17).fill_(-100);
      const auto results = [&](const std::optional<Fp8Recipe>& fp8) {
        for (const at::Tensor& one : {x, weight}) one.mutable_grad() = at::Tensor();
        const at::Tensor loss =
            fp8 ? linear_cross_entropy(x, weight, targets, 1, 2.0, fp8)  // parts of 64 or 128 rows
                : cross_entropy(at::matmul(x, weight.t()), targets);
        loss.backward(at::full({}, 2.0));
        return std::tuple(loss.item<double>(), x.grad(), weight.grad());
      };
      const auto [wanted, wanted_dx, wanted_dw] = results({});
      const auto [got, dx, dw] = results(recipe);
      EXPECT_NEAR(got, wanted, 0.01 * wanted) << classes;
      EXPECT_LT(test::relative_error(dx, wanted_dx), kHeadDistance) << classes;
      EXPECT_LT(test::relative_error(dw, wanted_dw), kHeadDistance) << classes;
      EXPECT_GT(test::relative_error(dw, wanted_dw), 1e-3) << classes << ": that is no FP8";
    }
  }
}

// Beyond the smallest e4m3 below their largest: gradients of most classes of an untrained model.
TEST(Fp8Head, GradientsOfManyClassesAreNotLost) {
  constexpr int64_t kClasses = 64 * 512;
  at::manual_seed(6);
  const at::Tensor x = at::randn({128, 64}).to(at::kBFloat16);
  const at::Tensor weight = at::zeros({kClasses, 64}, at::kBFloat16).requires_grad_();
  linear_cross_entropy(x, weight, at::zeros({128}, at::kLong), 1 << 30, 1.0, Fp8Recipe{}).backward();
  // Every class but the first has the same: the mean of x over V.
  const at::Tensor mean = x.to(at::kFloat).mean(0) / kClasses;
  EXPECT_LT(test::relative_error(weight.grad()[1], mean), 0.15);
  EXPECT_LT(test::relative_error(weight.grad()[kClasses - 1], mean), 0.15);
}

class Fp8Models : public testing::TestWithParam<plan::ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Families, Fp8Models,
                         testing::Values(plan::ModelFamily::kGpt2, plan::ModelFamily::kLlama),
                         [](const auto& test) { return std::string(plan::name(test.param)); });

TEST_P(Fp8Models, LossAndEveryGradientAreNearThoseOfBf16) {
  const Fp8Pass wanted = pass_of({.family = GetParam()});
  for (const Fp8Recipe& recipe : test::fp8_recipes()) {
    for (const bool head : {false, true}) {
      const Fp8Pass got = pass_of({.family = GetParam(), .recipe = recipe, .head = head});
      EXPECT_NEAR(got.loss, wanted.loss, 0.02);
      EXPECT_NE(got.loss, wanted.loss);
      for (const auto& [name, gradient] : wanted.gradients) {
        EXPECT_LT(test::relative_error(got.gradients.at(name), gradient), 0.25) << name << " head " << head;
      }
    }
  }
}

TEST_P(Fp8Models, WhatIsComputedAgainOrLaterHasTheSameBits) {
  for (const Fp8Recipe& recipe : test::fp8_recipes()) {
    for (const bool lends : {false, true}) {
      const Fp8Setting plain{.family = GetParam(), .recipe = recipe, .lends = lends, .micro_batches = 2};
      const Fp8Pass wanted = pass_of(plain);
      Fp8Setting cheap = plain, deferred = plain, both = plain;
      cheap.cheap = deferred.defers = both.cheap = both.defers = true;
      expect_same_bits(pass_of(cheap), wanted, "recomputed");
      expect_same_bits(pass_of(deferred), wanted, "deferred");
      expect_same_bits(pass_of(both), wanted, "recomputed and deferred");
    }
  }
}

/// Two steps from the same weights on the same tokens: what the first saw is what the second has.
TEST_P(Fp8Models, ScaledByTheSameStepBeforeAreThoseScaledByTheirOwn) {
  for (const Fp8Recipe& recipe : test::fp8_recipes()) {
    if (recipe.scaling != Fp8Scaling::kTensor) continue;
    const Fp8Setting own{.family = GetParam(), .recipe = recipe};
    Fp8Setting delayed = own;
    delayed.delayed = true;
    expect_same_bits(pass_of(delayed), pass_of(own), "delayed");
    for (const bool lends : {false, true}) {
      Fp8Setting plain = delayed;
      plain.micro_batches = 2;
      plain.lends = lends;
      const Fp8Pass wanted = pass_of(plain);
      Fp8Setting cheap = plain, deferred = plain;
      cheap.cheap = deferred.defers = true;
      expect_same_bits(pass_of(cheap), wanted, "recomputed");
      expect_same_bits(pass_of(deferred), wanted, "deferred");
    }
  }
}

/// What a step sees of each layer of a block, `number` and so on.
void see(Fp8History& history, double number) {
  at::Tensor seen = history.of_block({}, 0).layer.seen;
  seen.copy_(at::arange(seen.numel()) + number);
}

at::Tensor scales_of(const Fp8History& history) {
  return history.of_block({}, 0).layer.amax;
}

TEST(Fp8HistoryTest, ScalesByTheLargestOfTheLastSteps) {
  Fp8History history(2, 3, at::kCPU);
  EXPECT_FALSE(scales_of(history).defined()) << "nothing is known before the first step";
  EXPECT_TRUE(history.of_block({}, 1).layer.seen.defined());
  const std::vector<double> steps = {5, 9, 2, 4, 3, 1, 8}, largest = {5, 9, 9, 9, 4, 4, 8};
  for (size_t i = 0; i < steps.size(); ++i) {
    see(history, steps[i]);
    history.end_step();
    EXPECT_EQ(scales_of(history)[0].item<double>(), largest[i]) << i;
    EXPECT_EQ(history.of_block({}, 0).layer.at(BlockLayer::kFeedForwardOut).gradient_amax().item<double>(),
              largest[i] + 10.0);
    EXPECT_EQ(history.of_block({}, 0).layer.seen.abs().max().item<double>(), 0.0);
  }
  EXPECT_EQ(history.of_block({}, 1).layer.amax.abs().max().item<double>(), 0.0) << "nobody saw block 1";
}

TEST(Fp8HistoryTest, WhatIsNotFiniteOrNothingLeavesTheScaleOfBefore) {
  for (const double bad : {0.0, std::nan(""), HUGE_VAL}) {
    Fp8History history(1, 2, at::kCPU);
    see(history, 3);
    history.end_step();
    for (int step = 0; step < 4; ++step) {
      see(history, 1);
      history.of_block({}, 0).layer.seen[0].fill_(bad);
      history.end_step();
    }
    EXPECT_EQ(scales_of(history)[0].item<double>(), 3.0) << bad;
    EXPECT_EQ(scales_of(history)[1].item<double>(), 2.0) << bad;
  }
}

TEST(Fp8HistoryTest, GoesOnFromWhatWasSaved) {
  const auto all = [](int64_t) { return true; };
  for (const int64_t steps : {0, 1, 2, 3, 4, 7}) {
    for (const int64_t length : {2, 3, 5}) {
      Fp8History whole(1, 3, at::kCPU), resumed(1, length, at::kCPU), same(1, length, at::kCPU);
      const auto step = [&](double number, auto&... histories) {
        ((see(histories, number), histories.end_step()), ...);
      };
      for (int64_t i = 0; i < steps; ++i) step(static_cast<double>(10 - i * 5 % 7), whole, same);
      const at::Tensor saved = whole.saved();
      EXPECT_EQ(saved.size(0), std::min<int64_t>(steps, 3));
      EXPECT_EQ(resumed.restore(saved, all), steps > 0);
      if (steps == 0 || length > 3) continue;  // it cannot know what the shorter one forgot
      EXPECT_TRUE(at::equal(scales_of(resumed), scales_of(same))) << steps << " " << length;
      for (int i = 0; i < 4; ++i) {
        step(1.0 + i % 2, resumed, same);
        EXPECT_TRUE(at::equal(scales_of(resumed), scales_of(same))) << steps << " " << length << " " << i;
      }
    }
  }
}

TEST(Fp8HistoryTest, OfAnotherModelOrOtherBlocksIsNone) {
  Fp8History one(1, 3, at::kCPU), two(2, 3, at::kCPU), empty(2, 3, at::kCPU);
  see(one, 1);
  one.end_step();
  see(two, 1);
  two.end_step();
  EXPECT_FALSE(empty.restore(one.saved(), [](int64_t) { return true; }));
  EXPECT_FALSE(empty.restore(two.saved(), [](int64_t) { return true; })) << "block 1 was multiplied in bf16";
  EXPECT_FALSE(scales_of(empty).defined());
  EXPECT_TRUE(empty.restore(two.saved(), [](int64_t block) { return block == 0; }));
  EXPECT_TRUE(at::equal(scales_of(empty), scales_of(two)));
}

TEST_P(Fp8Models, BlocksThatAreLeftOutAndEvaluationAreThoseOfBf16) {
  const Fp8Recipe recipe;
  const auto none = [](int64_t) { return false; };
  expect_same_bits(pass_of({.family = GetParam(), .recipe = recipe, .blocks = none}),
                   pass_of({.family = GetParam()}), "no block");
  expect_same_bits(pass_of({.family = GetParam(), .recipe = recipe, .trains = false}),
                   pass_of({.family = GetParam(), .trains = false}), "evaluated");
  std::vector<int64_t> asked;
  const Fp8Pass some = pass_of({.family = GetParam(), .recipe = recipe, .blocks = [&](int64_t block) {
                                  asked.push_back(block);
                                  return block == 1;
                                }});
  EXPECT_EQ(asked, std::vector<int64_t>({0, 1, 2}));
  EXPECT_NE(some.loss, pass_of({.family = GetParam()}).loss);
}

}  // namespace
}  // namespace trireme::nn
