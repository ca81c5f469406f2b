// Gradients of biases by sums that the kernel behind them has noted, against sums of what autograd sees.
// Skipped without a GPU.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "trireme/kernels/device.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/nn/notes.h"
#include "trireme/nn/recomputed.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

constexpr int64_t kRows = 1030, kWidth = 256;

class GpuNotes : public testing::Test {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "there is no GPU";
    at::manual_seed(3);
    x = leaf({kRows, kWidth});
    weight = leaf({kWidth, kWidth});
    bias = leaf({kWidth});
    next_weight = leaf({kWidth, kWidth});
    next_bias = leaf({kWidth});
    scale = leaf({kWidth});
    shift = leaf({kWidth});
  }

  static at::Tensor leaf(at::IntArrayRef sizes) {
    return at::randn(sizes, at::TensorOptions().device(at::kCUDA)).to(at::kBFloat16).requires_grad_();
  }
  at::Tensor produced() const { return nn::linear(x, weight, bias); }
  at::Tensor normed(const at::Tensor& y) const { return add_layer_norm(x, y, scale, shift, 1e-5).second; }

  at::Tensor x, weight, bias, next_weight, next_bias, scale, shift;
};

using Use = std::function<at::Tensor(const at::Tensor&)>;

/// Backward through `use` of the linear layer's output, and the gradient of that output as a hook sees it.
at::Tensor seen_gradient(const at::Tensor& y, const Use& use) {
  at::Tensor seen;
  y.register_hook([&seen](const at::Tensor& gradient) { seen = gradient.detach().clone(); });
  const at::Tensor out = use(y);
  out.backward(at::randn_like(out));
  return seen;
}

/// bf16 holds the sum of fp32 sums.
void expect_sums(const at::Tensor& bias, const at::Tensor& gradient, const char* what) {
  const at::Tensor exact = gradient.to(at::kDouble).reshape({-1, gradient.size(-1)}).sum(0);
  const at::Tensor error = (bias.grad().to(at::kDouble) - exact).abs();
  const at::Tensor magnitude = gradient.to(at::kDouble).abs().reshape({-1, gradient.size(-1)}).sum(0);
  EXPECT_TRUE((error <= exact.abs() / 256 + 1e-6 * magnitude).all().item<bool>())
      << what << ": off by up to " << error.max().item<double>();
}

TEST_F(GpuNotes, SumsGoFromTheKernelThatWroteAGradientToTheBias) {
  const auto check = [&](const char* what, const Use& use) {
    bias.mutable_grad() = at::Tensor();
    const at::Tensor y = produced();
    EXPECT_TRUE(asks_for_gradient_sums(y)) << what;
    const at::Tensor gradient = torch::autograd::grad({use(y)}, {y}, {at::ones_like(y)}, true)[0];
    EXPECT_TRUE(noted_column_sums(gradient).defined()) << what;
    expect_sums(bias, seen_gradient(y, use), what);
  };
  check("LayerNorm of x + delta", [&](const at::Tensor& y) { return normed(y); });
  check("LayerNorm of x", [&](const at::Tensor& y) { return nn::layer_norm(y, scale, shift, 1e-5); });
  check("GELU", [](const at::Tensor& y) { return nn::gelu(y); });
  check("GELU behind a call of an engine",
        [](const at::Tensor& y) { return nn::gelu(call_after_backward(y, [] {})); });
  check("GELU that is computed again",
        [&](const at::Tensor& y) { return activated_linear(y, Activation::kGelu, next_weight, next_bias); });
  check("LayerNorm that is computed again", [&](const at::Tensor& y) {
    return add_norm_linear(x, y, {scale, shift, 1e-5}, next_weight, next_bias).second;
  });
}

TEST_F(GpuNotes, NobodyAsksWithoutABiasThatWantsAGradient) {
  EXPECT_FALSE(asks_for_gradient_sums(nn::linear(x, weight, at::Tensor())));
  EXPECT_FALSE(asks_for_gradient_sums(nn::linear(x, weight, bias.detach())));
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(asks_for_gradient_sums(produced()));
}

TEST_F(GpuNotes, AGradientThatChangedOnItsWayIsSummedAnew) {
  const auto check = [&](const char* what, const std::function<at::Tensor(at::Tensor)>& change) {
    bias.mutable_grad() = at::Tensor();
    const at::Tensor y = produced();
    y.register_hook(change);
    at::Tensor seen;
    y.register_hook([&seen](const at::Tensor& gradient) { seen = gradient.detach().clone(); });
    nn::gelu(y).backward(at::ones_like(y));
    expect_sums(bias, seen, what);
  };
  check("another tensor", [](const at::Tensor& gradient) { return gradient * 3.0; });
  check("written to", [](at::Tensor gradient) { return gradient.mul_(3.0); });
}

TEST_F(GpuNotes, BehindLayerNormSumsHaveTheSameBitsWithoutThem) {
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    for (at::Tensor* tensor : {&x, &weight, &bias, &scale, &shift}) {
      *tensor = tensor->detach().to(type).requires_grad_();
    }
    const auto gradient = [&](bool copies) {
      bias.mutable_grad() = at::Tensor();
      const at::Tensor y = produced();
      if (copies) y.register_hook([](const at::Tensor& passing) { return passing.clone(); });
      normed(y).backward(x.detach());
      return bias.grad();
    };
    EXPECT_TRUE(at::equal(gradient(false), gradient(true))) << c10::toString(type);
  }
}

TEST_F(GpuNotes, TheGradientsOfSeveralUsesAreSummedTogether) {
  const at::Tensor y = produced();
  expect_sums(bias,
              seen_gradient(y, [&](const at::Tensor& used) { return nn::gelu(used) + normed(used) + used; }),
              "three uses");
}

TEST_F(GpuNotes, SumsAddToAGradientThatExistsAlsoLater) {
  const auto once = [&] { nn::gelu(produced()).backward(at::ones_like(x)); };
  once();
  const at::Tensor first = bias.grad().clone();
  once();
  EXPECT_TRUE(at::equal(bias.grad(), first + first));

  bias.mutable_grad() = at::Tensor();
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    once();
  }
  EXPECT_FALSE(bias.grad().defined());
  later.run();
  EXPECT_TRUE(at::equal(bias.grad(), first));
}

TEST_F(GpuNotes, NoRowsGiveAGradientOfZero) {
  const at::Tensor none = x.detach().narrow(0, 0, 0);
  nn::gelu(nn::linear(none, weight, bias)).sum().backward();
  EXPECT_TRUE(bias.grad().eq(0).all().item<bool>());
}

}  // namespace
}  // namespace trireme::nn
