// Convolutions of channels-last images on a GPU, whose weights we turn, beside torch's own. Skipped without a
// GPU.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "tests/support/refusal.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/memory/recompute.h"
#include "trireme/nn/convolution.h"
#include "trireme/nn/image_layers.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

struct ConvCase {
  int64_t in, out, kernel;
  int64_t stride = 1, padding = 0;
};

const std::vector<ConvCase> kCases = {{3, 64, 3, 1, 1},   {5, 7, 3, 1, 1},   {3, 16, 7, 2, 3},
                                      {64, 128, 3, 2, 1}, {24, 40, 1},       {64, 128, 1, 2},
                                      {16, 8, 5, 1, 2},   {8, 8, 2, 2},      {1, 8, 3, 1, 1},
                                      {300, 64, 3, 1, 1}, {16, 16, 1, 1, 1}, {5, 3, 1}};

at::Tensor gpu_leaf(const at::Tensor& values, at::ScalarType dtype) {
  return values.to(c10::Device(c10::kCUDA, 0), dtype).detach().requires_grad_();
}

struct ConvTensors {
  at::Tensor x, weight;

  ConvTensors(const ConvCase& test, at::ScalarType dtype) {
    at::manual_seed(static_cast<uint64_t>(test.in * test.out));
    x = gpu_leaf(at::randn({4, test.in, 14, 17}).contiguous(kChannelsLast), dtype);
    weight = gpu_leaf(at::randn({test.out, test.in, test.kernel, test.kernel}), dtype);
  }
  ConvTensors(const ConvTensors& other)
      : x(other.x.detach().clone().requires_grad_(other.x.requires_grad())),
        weight(other.weight.detach().clone().requires_grad_(other.weight.requires_grad())) {}
};

at::Tensor torchs(const ConvTensors& tensors, const ConvCase& test) {
  return at::conv2d(tensors.x, tensors.weight, /*bias=*/{}, {test.stride, test.stride},
                    {test.padding, test.padding});
}

at::Tensor ours(const ConvTensors& tensors, const ConvCase& test) {
  return nn::conv2d(tensors.x, tensors.weight, test.stride, test.padding);
}

bool is_own(const at::Tensor& y) {
  return y.grad_fn()->name().find("ConvFunction") != std::string::npos;
}

/// The largest difference, over the largest value, where cuDNN may choose another algorithm.
void expect_near(const at::Tensor& got, const at::Tensor& wanted) {
  ASSERT_EQ(got.sizes(), wanted.sizes());
  const at::Tensor wide = wanted.detach().to(at::kDouble);
  const double limit = got.scalar_type() == at::kBFloat16 ? 1.2e-2 : 3e-3;
  EXPECT_LT((got.detach().to(at::kDouble) - wide).abs().max().item<double>(),
            limit * std::max(1e-3, wide.abs().max().item<double>()));
}

class GpuConvolution : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }

  static void in_all_cases(const std::function<void(const ConvCase&, at::ScalarType)>& check) {
    for (const ConvCase& test : kCases) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        SCOPED_TRACE(fmt::format("{}x{} of {} to {} channels, stride {}, {}", test.kernel, test.kernel,
                                 test.in, test.out, test.stride, c10::toString(dtype)));
        check(test, dtype);
      }
    }
  }
};

TEST_F(GpuConvolution, TurnsWeightsAndAddsGradientsToTheBit) {
  in_all_cases([](const ConvCase& test, at::ScalarType dtype) {
    const at::Tensor weight = ConvTensors(test, dtype).weight.detach();
    at::Tensor turned = at::empty_like(weight, weight.options(), kChannelsLast);
    kernels::turn_conv_weights(turned, weight);
    EXPECT_TRUE(at::equal(turned, weight));
    const at::Tensor before = at::randn_like(weight), wide = before.to(at::kFloat);
    const at::Tensor added = before.clone(), wide_added = wide.clone(), written = before.clone();
    kernels::add_conv_weights({added, true}, turned);
    kernels::add_conv_weights({wide_added, true}, turned);
    kernels::add_conv_weights({written, false}, turned);
    EXPECT_TRUE(at::equal(added, before + weight));
    EXPECT_TRUE(at::equal(wide_added, wide + weight.to(at::kFloat)));
    EXPECT_TRUE(at::equal(written, weight));
  });
}

TEST_F(GpuConvolution, IsTorchsAlsoWhereAGradientExists) {
  in_all_cases([](const ConvCase& test, at::ScalarType dtype) {
    const ConvTensors one(test, dtype), two(one);
    for (int pass = 0; pass < 2; ++pass) {
      const at::Tensor y = ours(one, test), wanted = torchs(two, test);
      EXPECT_EQ(is_own(y), test.in > 1);  // one channel is no layout
      expect_near(y, wanted);
      const at::Tensor dy = at::randn_like(wanted);
      y.backward(dy);
      wanted.backward(dy);
      expect_near(one.x.grad(), two.x.grad());
      expect_near(one.weight.grad(), two.weight.grad());
      EXPECT_TRUE(one.weight.grad().is_contiguous());
    }
  });
}

TEST_F(GpuConvolution, WritesToLentMemoryAndAddsToIt) {
  for (const ConvCase& test : {kCases[3], kCases[4]}) {
    for (const at::ScalarType of_gradient : {at::kBFloat16, at::kFloat}) {
      const ConvTensors one(test, at::kBFloat16), two(one);
      const at::Tensor memory =
          at::full_like(one.weight, std::nan(""), one.weight.options().dtype(of_gradient));
      lend_gradient(one.weight, memory);
      for (int pass = 0; pass < 2; ++pass) {
        ours(one, test).sum().backward();
        torchs(two, test).sum().backward();
        EXPECT_TRUE(one.weight.grad().is_alias_of(memory));
        expect_near(memory, two.weight.grad());
      }
    }
  }
}

TEST_F(GpuConvolution, ComputesTheGradientsThatAreWanted) {
  const ConvCase test = kCases[3];
  ConvTensors images(test, at::kBFloat16), frozen(images), all(images);
  images.x.requires_grad_(false);
  frozen.weight.requires_grad_(false);
  for (const ConvTensors* tensors : {&images, &frozen}) ours(*tensors, test).sum().backward();
  torchs(all, test).sum().backward();
  EXPECT_FALSE(images.x.grad().defined());
  EXPECT_FALSE(frozen.weight.grad().defined());
  expect_near(images.weight.grad(), all.weight.grad());
  expect_near(frozen.x.grad(), all.x.grad());
}

TEST_F(GpuConvolution, OfOneModuleMayBeUsedTwice) {
  const ConvCase test = {16, 16, 3, 1, 1};
  const ConvTensors tensors(test, at::kFloat), two(tensors);
  Conv2d conv({.out = 16, .in = 16, .kernel = 3, .padding = 1});
  conv.weight.set_data(tensors.weight.detach().clone());
  const auto twice = [&](const at::Tensor& x) { return conv.forward(conv.forward(x)); };
  twice(tensors.x).sum().backward();
  at::conv2d(torchs(two, test), two.weight, /*bias=*/{}, {1, 1}, {1, 1}).sum().backward();
  expect_near(conv.weight.grad(), two.weight.grad());
  expect_near(tensors.x.grad(), two.x.grad());
  const at::Tensor of_weight = conv.weight.grad().clone(), of_x = tensors.x.grad().clone();
  conv.weight.mutable_grad().reset();
  tensors.x.mutable_grad().reset();
  memory::recomputed(tensors.x, twice).sum().backward();
  expect_near(conv.weight.grad(), of_weight);
  expect_near(tensors.x.grad(), of_x);
}

TEST_F(GpuConvolution, KeepsNothingWithoutGradients) {
  const ConvCase test = kCases[3];
  const ConvTensors tensors(test, at::kBFloat16);
  const at::Tensor wanted = ours(tensors, test);
  const auto uses = tensors.x.use_count();
  const c10::NoGradGuard no_grad;
  const at::Tensor y = ours(tensors, test);
  EXPECT_EQ(y.grad_fn(), nullptr);
  EXPECT_EQ(tensors.x.use_count(), uses);
  expect_near(y, wanted);
}

TEST_F(GpuConvolution, NoticesAWeightThatWasChangedBeforeBackward) {
  for (const ConvCase& test : {kCases[3], kCases[4]}) {
    const ConvTensors tensors(test, at::kBFloat16);
    const at::Tensor sum = ours(tensors, test).sum();
    {
      const c10::NoGradGuard no_grad;
      tensors.weight.mul_(2.0);
    }
    EXPECT_THROW(sum.backward(), c10::Error);
  }
}

TEST_F(GpuConvolution, HasNoSecondDerivative) {
  const ConvCase test = kCases[3];
  const at::Tensor sum = ours(ConvTensors(test, at::kFloat), test).sum();
  test::expect_refusal([&] { sum.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                       {"[nn.conv2d] backward was called with create_graph"});
}

}  // namespace
}  // namespace trireme::nn
