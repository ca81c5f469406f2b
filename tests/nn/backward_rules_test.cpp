// What all our autograd functions have in common: no second derivative, one backward pass through a loss, and
// outputs that nobody uses.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/support/refusal.h"
#include "trireme/nn/attention.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/recomputed.h"
#include "trireme/nn/swiglu_feed_forward.h"

namespace trireme::nn {
namespace {

at::Tensor random_leaf(at::IntArrayRef shape) {
  return at::randn(shape).requires_grad_();
}

TEST(BackwardPasses, ASecondBackwardThroughALossIsRefused) {
  const at::Tensor x = random_leaf({4, 8}), weight = random_leaf({6, 8});
  const at::Tensor targets = at::randint(6, {4}, at::kLong);
  for (const at::Tensor& loss :
       {cross_entropy(at::matmul(x, weight.t()), targets), linear_cross_entropy(x, weight, targets, 1)}) {
    loss.backward({}, /*retain_graph=*/true);
    test::expect_refusal([&] { loss.backward(); }, {"cross_entropy] backward was called twice"});
  }
}

TEST(BackwardPasses, NoneHasASecondDerivative) {
  const at::Tensor x = random_leaf({2, 3, 8}), weight = random_leaf({8, 8}), scale = random_leaf({8}),
                   bias = random_leaf({8});
  const at::Tensor qkv = random_leaf({1, 4, 24}), long_qkv = random_leaf({1, 520, 24}),
                   narrow = random_leaf({8, 4});
  const at::Tensor targets = at::randint(8, {6}, at::kLong);
  const Norm norm = {scale, bias, 1e-5};
  const AttentionShape shape = {.heads = 2, .kv_heads = 2, .head_dim = 4};
  const std::vector<std::pair<std::string, std::function<at::Tensor()>>> functions = {
      {"nn.linear", [&] { return nn::linear(x, weight, bias); }},
      {"nn.linear", [&] { return linear_group(x, weight); }},
      {"nn.linear", [&] { return logits(x, weight); }},
      {"nn.add_norm", [&] { return nn::rms_norm(x, scale, 1e-5); }},
      {"nn.add_norm", [&] { return nn::layer_norm(x, scale, bias, 1e-5); }},
      {"nn.swiglu", [&] { return swiglu(x); }},
      {"nn.gelu", [&] { return nn::gelu(x); }},
      {"nn.scale_columns", [&] { return scale_columns(x, scale); }},
      {"nn.add_norm_linear",
       [&] { return add_norm_linear(x, {}, norm, weight, {}, WeightLayout::kOutIn).second; }},
      {"nn.activated_linear", [&] { return activated_linear(x, Activation::kSwiglu, narrow, {}); }},
      {"nn.swiglu_feed_forward",
       [&] {
         const at::Tensor wide = random_leaf({128, 128}).to(at::kBFloat16);
         const Fp8Recipe recipe = {.scaling = kernels::Fp8Scaling::kBlock};
         return swiglu_feed_forward(wide, {wide, wide}, wide, wide, recipe, recipe);
       }},
      {"nn.attention", [&] { return causal_attention(qkv, shape, {}); }},
      {"nn.attention", [&] { return causal_attention(long_qkv, shape, {}); }},
      {"nn.cross_entropy",
       [&] {
         return cross_entropy(at::matmul(x.view({6, 8}), weight.t()), targets);
       }},
      {"nn.linear_cross_entropy", [&] {
         return linear_cross_entropy(x.view({6, 8}), weight, targets, 1);
       }}};
  for (const auto& [name, function] : functions) {
    const at::Tensor sum = function().sum();
    test::expect_refusal([&] { sum.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                         {fmt::format("[{}] backward was called with create_graph", name)});
  }
}

/// Either output of a norm may be unused: gradients are as if the other had got zeros.
TEST(BackwardPasses, NormsTakeTheGradientOfEitherOutputAlone) {
  const at::Tensor x = random_leaf({2, 3, 8}), delta = random_leaf({2, 3, 8}), scale = random_leaf({8}),
                   bias = random_leaf({8}), weight = random_leaf({4, 8});
  const std::vector<std::function<std::pair<at::Tensor, at::Tensor>()>> norms = {
      [&] { return add_rms_norm(x, delta, scale, 1e-5); },
      [&] { return add_layer_norm(x, delta, scale, bias, 1e-5); },
      [&] {
        return add_norm_linear(x, delta, {scale, bias, 1e-5}, weight, {}, WeightLayout::kOutIn);
      }};
  const auto grads_of = [&](const at::Tensor& loss) {
    std::vector<at::Tensor> grads;
    for (const at::Tensor* each : {&x, &delta, &scale, &bias, &weight}) each->mutable_grad() = at::Tensor();
    loss.backward();
    for (const at::Tensor* each : {&x, &delta, &scale, &bias, &weight})
      grads.push_back(each->grad().defined() ? each->grad().clone() : at::zeros_like(*each));
    return grads;
  };
  for (const auto& norm : norms) {
    for (const bool first : {true, false}) {
      const auto [sum, y] = norm();
      const std::vector<at::Tensor> alone = grads_of((first ? sum : y).square().sum());
      const auto [sum_too, y_too] = norm();
      const std::vector<at::Tensor> both =
          grads_of((first ? sum_too : y_too).square().sum() + 0.0 * (first ? y_too : sum_too).sum());
      for (size_t i = 0; i < both.size(); ++i) EXPECT_TRUE(at::allclose(alone[i], both[i])) << i;
    }
  }
}

}  // namespace
}  // namespace trireme::nn
