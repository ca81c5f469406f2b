// Our autograd functions against ATen's differentiable operations, values and gradients, and the rules about
// where gradients of parameters go.
#include "trireme/nn/functional.h"
#include "trireme/nn/recomputed.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/nan_memory.h"
#include "trireme/base/error.h"
#include "trireme/nn/attention.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

at::Tensor leaf_of(at::IntArrayRef shape) {
  return at::randn(shape).requires_grad_();
}

/// Largest difference of a and b, relative to the largest magnitude of b.
double difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

/// Differentiates `ours` and `theirs` of the same leaves with one random output gradient and compares
/// everything.
void expect_same(const std::vector<at::Tensor>& leaves, const std::function<at::Tensor()>& ours,
                 const std::function<at::Tensor()>& theirs, double tolerance = 2e-6) {
  const at::Tensor expected = theirs();
  const at::Tensor gradient = at::randn_like(expected);
  expected.backward(gradient);
  std::vector<at::Tensor> expected_grads;
  for (const at::Tensor& each : leaves) {
    expected_grads.push_back(each.grad().clone());
    each.mutable_grad() = at::Tensor();
  }
  const at::Tensor actual = ours();
  EXPECT_LT(difference(actual.detach(), expected.detach()), tolerance);
  actual.backward(gradient);
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_LT(difference(leaves[i].grad(), expected_grads[i]), tolerance) << "gradient " << i;
  }
}

class Functional : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(1); }
};

TEST_F(Functional, LinearMatchesAtenInBothLayouts) {
  const at::Tensor x = leaf_of({3, 5, 7});
  const at::Tensor bias = leaf_of({4});
  const at::Tensor out_in = leaf_of({4, 7});
  expect_same(
      {x, out_in, bias}, [&] { return nn::linear(x, out_in, bias); },
      [&] { return at::linear(x, out_in, bias); });
  const at::Tensor in_out = leaf_of({7, 4});
  x.mutable_grad() = at::Tensor();
  bias.mutable_grad() = at::Tensor();
  expect_same(
      {x, in_out, bias}, [&] { return nn::linear(x, in_out, bias, WeightLayout::kInOut); },
      [&] { return at::matmul(x, in_out) + bias; });
}

TEST_F(Functional, RefusesWhatDoesNotFit) {
  const at::Tensor x = at::randn({3, 5}), weight = at::randn({4, 5});
  EXPECT_THROW(nn::linear(x, at::randn({4, 6}), {}), LogicError) << "inner sizes";
  EXPECT_THROW(nn::linear(x, weight, at::randn({3})), LogicError) << "a short bias";
  EXPECT_THROW(nn::linear(x, weight.to(at::kBFloat16), {}), LogicError) << "two dtypes";
  EXPECT_THROW(nn::linear(x, weight, at::randn({4}, at::kDouble)), LogicError) << "a bias of another dtype";
}

TEST_F(Functional, AResidualIsAddedToTheProduct) {
  const at::Tensor x = leaf_of({3, 5, 7}), weight = leaf_of({4, 7}), bias = leaf_of({4}),
                   residual = leaf_of({3, 5, 4});
  expect_same(
      {x, weight, bias, residual},
      [&] { return nn::linear(x, weight, bias, WeightLayout::kOutIn, residual); },
      [&] { return residual + at::linear(x, weight, bias); });
  const at::Tensor wide = leaf_of({3, 5, 14}), narrow = leaf_of({4, 7}), other = leaf_of({3, 5, 4});
  expect_same(
      {wide, narrow, other},
      [&] { return activated_linear(wide, Activation::kSwiglu, narrow, {}, WeightLayout::kOutIn, other); },
      [&] { return other + at::linear(swiglu(wide), narrow); });
}

TEST_F(Functional, LinearGroupEqualsSeparateLinears) {
  const at::Tensor x = leaf_of({2, 3, 6});
  const std::vector<at::Tensor> weights = {leaf_of({4, 6}), leaf_of({2, 6}), leaf_of({2, 6})};
  expect_same(
      {x, weights[0], weights[1], weights[2]}, [&] { return linear_group(x, weights); },
      [&] {
        return at::cat({at::linear(x, weights[0]), at::linear(x, weights[1]), at::linear(x, weights[2])}, -1);
      });
}

TEST_F(Functional, LinearGroupUsesNeighboursInMemoryAndTheirGradientsInPlace) {
  const at::Tensor flat = at::randn({48});
  const at::Tensor flat_grad = at::zeros({48});
  std::vector<at::Tensor> weights;
  for (const auto& [offset, rows] : {std::pair{0, 4}, std::pair{24, 2}, std::pair{36, 2}}) {
    at::Tensor weight = at::empty({0}).requires_grad_();
    weight.set_data(flat.narrow(0, offset, rows * 6).view({rows, 6}));
    weight.mutable_grad() = flat_grad.narrow(0, offset, rows * 6).view({rows, 6});
    weights.push_back(weight);
  }
  const at::Tensor x = at::randn({5, 6});
  const at::Tensor y = linear_group(x, weights);
  EXPECT_LT(difference(y.detach(), at::mm(x, flat.view({8, 6}).t())), 1e-6);
  const at::Tensor gradient = at::randn_like(y);
  y.backward(gradient);
  EXPECT_LT(difference(flat_grad.view({8, 6}), at::mm(gradient.t(), x)), 1e-6);
  linear_group(x, weights).backward(gradient);
  EXPECT_LT(difference(flat_grad.view({8, 6}), 2 * at::mm(gradient.t(), x)), 1e-6) << "a second pass adds";
}

/// Memory as an engine lends it: whatever was in it before.
at::Tensor lend_garbage(const at::Tensor& param, const at::Tensor& memory) {
  lend_gradient(param, memory.fill_(std::nan("")));
  return memory;
}

TEST_F(Functional, FirstGradientsOverwriteLentMemoryAndLaterOnesAddToIt) {
  const at::Tensor x = at::randn({5, 3}), weight = leaf_of({2, 3}), bias = leaf_of({2});
  const at::Tensor weight_memory = lend_garbage(weight, at::empty({2, 3}));
  const at::Tensor bias_memory = lend_garbage(bias, at::empty({2}));
  EXPECT_FALSE(weight.grad().defined()) << "nobody has computed one";
  const at::Tensor expected = at::ones({2, 5}).mm(x);
  for (const int64_t pass : {1, 2}) {
    nn::linear(x, weight, bias).sum().backward();
    EXPECT_EQ(weight.grad().data_ptr(), weight_memory.data_ptr());
    EXPECT_EQ(bias.grad().data_ptr(), bias_memory.data_ptr());
    EXPECT_LT(difference(weight.grad(), pass * expected), 1e-5);
    EXPECT_LT(difference(bias.grad(), pass * at::full({2}, 5.0)), 1e-5);
  }
  lend_gradient(weight, {});
  weight.mutable_grad() = at::Tensor();
  nn::linear(x, weight, bias).sum().backward();
  EXPECT_NE(weight.grad().data_ptr(), weight_memory.data_ptr()) << "it was taken back";
}

TEST_F(Functional, GroupsOverwriteLentMemoryWhetherItIsOnePieceOrNot) {
  const at::Tensor x = at::randn({5, 6});
  for (const int64_t gap : {0, 8}) {
    const at::Tensor flat_grad = at::full({36 + gap}, std::nan(""));
    const std::vector<at::Tensor> weights = {leaf_of({4, 6}), leaf_of({2, 6})};
    lend_gradient(weights[0], flat_grad.narrow(0, 0, 24).view({4, 6}));
    lend_gradient(weights[1], flat_grad.narrow(0, 24 + gap, 12).view({2, 6}));
    const at::Tensor y = linear_group(x, weights);
    const at::Tensor gradient = at::randn_like(y);
    y.backward(gradient);
    EXPECT_LT(difference(at::cat({weights[0].grad(), weights[1].grad()}), at::mm(gradient.t(), x)), 1e-5);
    EXPECT_TRUE(weights[1].grad().is_alias_of(flat_grad));
  }
}

TEST_F(Functional, DetachedCopiesOfAParameterHaveBorrowedNothing) {
  const at::Tensor x = at::randn({5, 3}), weight = leaf_of({2, 3});
  const at::Tensor memory = at::ones({2, 3});
  lend_gradient(weight, memory);
  const at::Tensor copy = weight.detach().requires_grad_();
  nn::linear(x, copy, {}).sum().backward();
  EXPECT_FALSE(copy.grad().is_alias_of(memory));
  EXPECT_TRUE(at::equal(memory, at::ones({2, 3})));
}

TEST_F(Functional, GroupsMayBePartlyFrozen) {
  const at::Tensor x = at::randn({5, 6}), frozen = at::randn({4, 6}), trained = leaf_of({2, 6});
  const at::Tensor y = linear_group(x, {frozen, trained});
  const at::Tensor gradient = at::randn_like(y);
  y.backward(gradient);
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_LT(difference(trained.grad(), at::mm(gradient.narrow(1, 4, 2).t(), x)), 1e-5);
}

TEST_F(Functional, OperationsOfAtenLeaveLentMemoryAlone) {
  const at::Tensor x = at::randn({5, 3}), weight = leaf_of({2, 3});
  const at::Tensor memory = lend_garbage(weight, at::empty({2, 3}));
  at::linear(x, weight).sum().backward();
  EXPECT_LT(difference(weight.grad(), at::ones({2, 5}).mm(x)), 1e-5);
  EXPECT_FALSE(weight.grad().is_alias_of(memory));
}

TEST_F(Functional, ParameterHooksFireThoughTheGradientIsWrittenInPlace) {
  const at::Tensor x = at::randn({4, 3});
  const at::Tensor weight = leaf_of({2, 3});
  weight.mutable_grad() = at::zeros({2, 3});
  const void* memory = weight.grad().data_ptr();
  nn::linear(x, weight, {}).sum().backward();
  EXPECT_EQ(weight.grad().data_ptr(), memory);
  EXPECT_LT(difference(weight.grad(), at::ones({2, 4}).mm(x)), 1e-6);
}

TEST_F(Functional, FrozenWeightsGetNoGradient) {
  const at::Tensor x = leaf_of({4, 3});
  const at::Tensor frozen = at::randn({2, 3});
  nn::linear(x, frozen, {}).sum().backward();
  EXPECT_FALSE(frozen.grad().defined());
  EXPECT_LT(difference(x.grad(), at::ones({4, 2}).mm(frozen)), 1e-6);
}

TEST_F(Functional, NormsMatchAten) {
  for (const int64_t width : {7, 64, 130}) {  // gradients of narrower rows cancel to rounding noise
    for (const int64_t rows : {1, 3, 200}) {
      const at::Tensor x = leaf_of({rows, width});
      const at::Tensor weight = leaf_of({width});
      const at::Tensor bias = leaf_of({width});
      expect_same(
          {x, weight, bias}, [&] { return nn::layer_norm(x, weight, bias, 1e-5); },
          [&] { return at::layer_norm(x, weight.sizes(), weight, bias, 1e-5); }, 1e-5);
      x.mutable_grad() = at::Tensor();
      weight.mutable_grad() = at::Tensor();
      expect_same(
          {x, weight}, [&] { return nn::rms_norm(x, weight, 1e-3); },
          [&] { return x * at::rsqrt(x.square().mean(-1, true) + 1e-3) * weight; }, 1e-5);
    }
  }
}

TEST_F(Functional, ActivationsMatchAtenOverTheWholeRange) {
  const at::Tensor x = (at::linspace(-30, 30, 4000).view({100, 40})).requires_grad_();
  expect_same(
      {x}, [&] { return nn::gelu(x); }, [&] { return at::gelu(x, "tanh"); }, 1e-6);
  x.mutable_grad() = at::Tensor();
  expect_same(
      {x}, [&] { return swiglu(x); }, [&] { return at::silu(x.narrow(1, 0, 20)) * x.narrow(1, 20, 20); },
      1e-6);
}

TEST_F(Functional, ScaledColumnsMatchAten) {
  for (const int64_t width : {1, 7, 64}) {
    for (const std::vector<int64_t>& rows : std::vector<std::vector<int64_t>>{{1}, {5}, {2, 3}}) {
      std::vector<int64_t> shape = rows;
      shape.push_back(width);
      const at::Tensor x = leaf_of(shape), factors = leaf_of({width});
      expect_same(
          {x, factors}, [&] { return scale_columns(x, factors); }, [&] { return x * factors; }, 1e-6);
    }
  }
  const at::Tensor turned = leaf_of({8, 6}), factors = leaf_of({8});
  expect_same(
      {turned, factors}, [&] { return scale_columns(turned.t(), factors); },
      [&] { return turned.t() * factors; }, 1e-6);
  const at::Tensor none = leaf_of({0, 8});
  factors.mutable_grad() = at::Tensor();
  scale_columns(none, factors).sum().backward();
  EXPECT_TRUE(at::equal(factors.grad(), at::zeros({8})));
  const at::Tensor narrow = at::randn({4, 8}).to(at::kBFloat16);
  const at::Tensor scaled = scale_columns(narrow, factors);
  EXPECT_EQ(scaled.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(scaled, (narrow.to(at::kFloat) * factors).to(at::kBFloat16)));
}

at::Tensor plain_rope(const at::Tensor& heads, double theta) {  // (B, H, T, hd), straight from the definition
  const int64_t length = heads.size(2), half = heads.size(3) / 2;
  at::Tensor out = at::empty_like(heads);
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(t) * std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
      const at::Tensor a = heads.select(2, t).select(2, i), b = heads.select(2, t).select(2, half + i);
      out.select(2, t).select(2, i).copy_(a * std::cos(angle) - b * std::sin(angle));
      out.select(2, t).select(2, half + i).copy_(b * std::cos(angle) + a * std::sin(angle));
    }
  }
  return out;
}

at::Tensor plain_attention(const at::Tensor& qkv, const AttentionShape& shape, double theta) {
  const at::Tensor heads = qkv.view({qkv.size(0), qkv.size(1), -1, shape.head_dim}).transpose(1, 2);
  const int64_t group = shape.heads / shape.kv_heads;
  at::Tensor q = heads.narrow(1, 0, shape.heads), k = heads.narrow(1, shape.heads, shape.kv_heads);
  if (theta > 0) {
    q = plain_rope(q, theta);
    k = plain_rope(k, theta);
  }
  k = k.repeat_interleave(group, 1);
  const at::Tensor v =
      heads.narrow(1, shape.heads + shape.kv_heads, shape.kv_heads).repeat_interleave(group, 1);
  const at::Tensor mask = at::ones({qkv.size(1), qkv.size(1)}, at::kBool).triu(1);
  const at::Tensor scores =
      (at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(shape.head_dim)))
          .masked_fill(mask, -std::numeric_limits<float>::infinity());
  return at::matmul(at::softmax(scores, -1), v).transpose(1, 2).reshape({qkv.size(0), qkv.size(1), -1});
}

void expect_as_defined(int64_t length, const AttentionShape& shape, double theta) {
  const at::Tensor qkv = leaf_of({2, length, (shape.heads + 2 * shape.kv_heads) * shape.head_dim});
  const RopeTable rope = theta > 0 ? make_rope_table(length, shape.head_dim, theta, at::kCPU) : RopeTable{};
  expect_same(
      {qkv}, [&] { return causal_attention(qkv + 0, shape, rope); },
      [&] { return plain_attention(qkv, shape, theta); }, 1e-5);
}

TEST_F(Functional, AttentionMatchesItsDefinition) {
  for (const int64_t length : {1, 17, 64, 150, 520}) {  // one tile, several, and several blocks of them
    for (const AttentionShape& shape :
         {AttentionShape{4, 4, 8}, AttentionShape{4, 2, 8}, AttentionShape{6, 1, 16},
          AttentionShape{2, 1, 36}, AttentionShape{1, 1, 64}}) {
      for (const double theta : {0.0, 10000.0}) {
        if (length > 150 && (shape.kv_heads != 2 || theta == 0.0)) continue;
        expect_as_defined(length, shape, theta);
      }
    }
  }
}

TEST_F(Functional, AttentionInDoubleStaysDouble) {
  for (const plan::AttentionKind kind : plan::all_values<plan::AttentionKind>()) {
    const AttentionShape shape{2, 1, 8, kind};
    const at::Tensor qkv = at::randn({1, 20, 4 * 8}, at::kDouble).requires_grad_();
    expect_same(
        {qkv}, [&] { return causal_attention(qkv + 0, shape, {}); },
        [&] { return plain_attention(qkv, shape, 0.0); }, 1e-13);
  }
}

TEST_F(Functional, EagerAttentionMatchesItsDefinition) {
  constexpr plan::AttentionKind kEager = plan::AttentionKind::kEager;
  for (const int64_t length : {1, 17, 150}) {
    for (const AttentionShape& shape : {AttentionShape{4, 4, 8, kEager}, AttentionShape{6, 2, 16, kEager}}) {
      for (const double theta : {0.0, 10000.0}) {
        expect_as_defined(length, shape, theta);
      }
    }
  }
}

/// The output is the weights where values make the identity. Each is dropped, or grows by 1 / (1 - p).
TEST_F(Functional, EagerAttentionDropsWeightsAndKeepsTheirExpectation) {
  constexpr int64_t kLength = 64;
  constexpr double kDropout = 0.25;
  const AttentionShape shape{1, 1, kLength, plan::AttentionKind::kEager};
  at::Tensor qkv = at::randn({1, kLength, 3 * kLength});
  qkv.narrow(2, 2 * kLength, kLength).copy_(at::eye(kLength));
  const at::Tensor all = causal_attention(qkv, shape, {}), some = causal_attention(qkv, shape, {}, kDropout);
  const at::Tensor dropped = (some == 0.0) & (all > 0.0);
  EXPECT_LT(difference(some, at::where(dropped, 0.0, all / (1.0 - kDropout))), 1e-5);
  const double weights = (all > 0.0).sum().item<double>(), share = dropped.sum().item<double>() / weights;
  EXPECT_NEAR(share, kDropout, 4.0 * std::sqrt(kDropout * (1.0 - kDropout) / weights));
}

TEST_F(Functional, AttentionInBf16RoundsItsInputsAndOutputsAlone) {
  const AttentionShape shape{4, 2, 16};
  const at::Tensor given = at::randn({2, 70, 8 * 16}).to(at::kBFloat16);
  const at::Tensor narrow = given.clone().requires_grad_(), wide = given.to(at::kFloat).requires_grad_();
  const at::Tensor output = causal_attention(narrow + 0, shape, {});
  const at::Tensor expected = plain_attention(wide, shape, 0.0);
  const at::Tensor d_output = at::randn_like(output);
  output.backward(d_output);
  expected.backward(d_output.to(at::kFloat));
  EXPECT_LT(difference(output.detach(), expected.detach()), 4e-3);
  EXPECT_LT(difference(narrow.grad(), wide.grad()), 4e-3);
}

TEST_F(Functional, CrossEntropyMatchesAten) {
  for (const int64_t classes : {2, 61, 256}) {
    const at::Tensor logits = (20 * at::randn({33, classes})).requires_grad_();
    const at::Tensor targets = at::randint(classes, {33}, at::kLong);
    const at::Tensor expected = at::cross_entropy_loss(logits, targets);
    expected.backward();
    const at::Tensor expected_grad = logits.grad().clone();
    logits.mutable_grad() = at::Tensor();
    const at::Tensor actual = cross_entropy(logits + 0, targets);
    EXPECT_NEAR(actual.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());
    actual.backward(at::full({}, 0.5));
    EXPECT_LT(difference(logits.grad(), 0.5 * expected_grad), 1e-5);
  }
}

/// Mean loss of x @ weight^T by one of our functions, or by ATen's.
enum class LossBy { kAten, kLogits, kParts };

at::Tensor mean_loss(LossBy by, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& targets) {
  if (by == LossBy::kParts) return linear_cross_entropy(x, weight, targets, 1);  // 64 rows at a time
  const at::Tensor logits = at::matmul(x, weight.t());
  return by == LossBy::kLogits ? cross_entropy(logits, targets) : at::cross_entropy_loss(logits, targets);
}

TEST_F(Functional, IgnoredRowsLeaveTheMeanAsInTorch) {
  for (const int64_t ignored : {1, 64, 100, 149, 150}) {
    const at::Tensor x = at::randn({150, 12}).requires_grad_(), weight = at::randn({64, 12}).requires_grad_();
    at::Tensor targets = at::randint(64, {150}, at::kLong);
    targets.narrow(0, 0, ignored).fill_(-100);  // the first of three parts wholly, where there are enough
    const auto differentiate = [&](LossBy by) {
      for (const at::Tensor* leaf_of : {&x, &weight}) leaf_of->mutable_grad() = at::Tensor();
      const at::Tensor loss = mean_loss(by, x, weight, targets);
      loss.backward(at::full({}, 0.5));
      return std::tuple(loss.item<double>(), x.grad().clone(), weight.grad().clone());
    };
    const auto [loss, d_x, d_weight] = differentiate(LossBy::kAten);
    EXPECT_EQ(std::isnan(loss), ignored == 150);
    for (const LossBy by : {LossBy::kLogits, LossBy::kParts}) {
      const auto [our_loss, our_d_x, our_d_weight] = differentiate(by);
      if (ignored == 150) {
        EXPECT_TRUE(std::isnan(our_loss)) << "a mean over no rows";
        EXPECT_TRUE(at::equal(our_d_x, d_x) && at::equal(our_d_weight, d_weight)) << "zeros";
        continue;
      }
      EXPECT_NEAR(our_loss, loss, 1e-5 * loss) << ignored;
      EXPECT_LT(difference(our_d_x, d_x), 1e-5) << ignored;
      EXPECT_LT(difference(our_d_weight, d_weight), 1e-5) << ignored;
    }
  }
}

TEST_F(Functional, AMeanOverNoRowsHasGradientsOfZero) {
  const test::NanMemory nan_memory;
  ASSERT_TRUE(at::empty({4}).isnan().all().item<bool>());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t classes : {64, 61}) {
      const at::Tensor x = at::zeros({0, 12}, dtype).requires_grad_(),
                       weight = at::ones({classes, 12}, dtype).requires_grad_();
      const at::Tensor loss = mean_loss(LossBy::kParts, x, weight, at::zeros({0}, at::kLong));
      loss.backward();
      EXPECT_TRUE(std::isnan(loss.item<double>()));
      EXPECT_EQ(x.grad().sizes(), x.sizes());
      EXPECT_TRUE(at::equal(weight.grad(), at::zeros_like(weight))) << classes << " classes";
    }
  }
}

TEST_F(Functional, CrossEntropyRefusesTargetsThatAreNoClass) {
  for (const int64_t wrong : {int64_t{64}, int64_t{-1}, int64_t{1} << 40}) {
    at::Tensor targets = at::zeros({150}, at::kLong);
    targets[77] = wrong;
    for (const LossBy by : {LossBy::kLogits, LossBy::kParts}) {
      try {
        mean_loss(by, at::randn({150, 12}).requires_grad_(), at::randn({64, 12}), targets);
        ADD_FAILURE() << wrong << " was taken";
      } catch (const DataError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find(std::to_string(wrong)), std::string::npos) << text;
        EXPECT_NE(text.find("64 classes"), std::string::npos) << text;
        EXPECT_EQ(by == LossBy::kLogits, text.find("row 77") != std::string::npos) << text;
      }
    }
  }
}

TEST_F(Functional, CrossEntropyOfExtremeLogitsStaysFinite) {
  const at::Tensor logits = at::full({2, 5}, -1e30).requires_grad_();
  const at::Tensor changed = logits + at::tensor({0.0f, 1e30f, 0.0f, 0.0f, 0.0f});
  const at::Tensor loss = cross_entropy(changed, at::ones({2}, at::kLong));
  EXPECT_NEAR(loss.item<double>(), 0.0, 1e-6);
  loss.backward();
  EXPECT_TRUE(logits.grad().isfinite().all().item<bool>());
}

TEST_F(Functional, CrossEntropyOfBf16KeepsTheDigitsOfARowThatIsNearlyRight) {
  // p = 1 / (1 + exp(-7)) is 0.99909: bf16, whose steps are 0.004 there, has 1.
  const at::Tensor logits = at::tensor({7.0f, 0.0f}).view({1, 2}).to(at::kBFloat16).requires_grad_();
  cross_entropy(logits * 1.0, at::zeros({1}, at::kLong)).backward();
  const double other = 1.0 / (1.0 + std::exp(7.0));
  EXPECT_NEAR(logits.grad()[0][0].item<double>(), -other, 0.01 * other);
  EXPECT_NEAR(logits.grad()[0][1].item<double>(), other, 0.01 * other);
}

TEST_F(Functional, CrossEntropyRefusesAnotherNumberOfTargets) {
  EXPECT_THROW(cross_entropy(at::randn({4, 3}), at::zeros({5}, at::kLong)), LogicError);
}

}  // namespace
}  // namespace trireme::nn
