// Our layers under all that autograd offers besides loss.backward(): hooks that see or replace gradients,
// gradients for certain tensors only, gradients that are there already. Each must do what torch's own does.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "tests/support/own_layers.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

using test::OwnLayer;
using test::Tensors;
using torch::autograd::grad;

enum class Grad { kNone, kThere, kLent };
constexpr Grad kGrads[] = {Grad::kNone, Grad::kThere, Grad::kLent};

/// A layer with leaves of its own, the same for every instance.
struct Instance {
  Instance(const OwnLayer& layer, const OwnLayer::Compute& compute, Grad state) : compute(compute) {
    at::manual_seed(3);
    x = at::randn({test::kLayerRows, test::kLayerWidth}).requires_grad_();
    for (const auto& shape : layer.shapes) {
      params.push_back((at::randn(shape) + 0.5).requires_grad_());
      if (state == Grad::kThere) params.back().mutable_grad() = at::randn(shape);
      if (state == Grad::kLent) lend_gradient(params.back(), at::full(shape, std::nan("")));
    }
  }
  at::Tensor loss() const { return compute(x, params).square().mean(); }
  Tensors grads() const {
    Tensors all = {x.grad()};
    for (const at::Tensor& param : params) all.push_back(param.grad());
    for (at::Tensor& each : all) {
      if (each.defined()) each = each.clone();
    }
    return all;
  }

  OwnLayer::Compute compute;
  at::Tensor x;
  Tensors params;
};

void expect_same(const Tensors& got, const Tensors& wanted, const std::string& what) {
  ASSERT_EQ(got.size(), wanted.size()) << what;
  for (size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined()) << what << ", tensor " << i;
    if (!wanted[i].defined()) continue;
    EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-4, 1e-5)) << what << ", tensor " << i << "\n"
                                                             << got[i] << "\n"
                                                             << wanted[i];
  }
}

/// What `use` returns for ours and for torch's must agree, as must all grad() afterwards.
template <typename Use>
void expect_as_torch(const Use& use) {
  for (const OwnLayer& layer : test::own_layers()) {
    for (const Grad state : kGrads) {
      const std::string what = layer.name + ", grad() " + std::to_string(static_cast<int>(state));
      Instance ours(layer, layer.ours, state);
      Instance theirs(layer, layer.theirs, state);
      const Tensors got = use(ours), wanted = use(theirs);
      expect_same(got, wanted, what + ", returned");
      expect_same(ours.grads(), theirs.grads(), what + ", grad()");
    }
  }
}

TEST(GradientRules, BackwardAddsToWhatIsThere) {
  expect_as_torch([](Instance& layer) {
    layer.loss().backward();
    layer.loss().backward();
    return Tensors();
  });
}

TEST(GradientRules, GradientsOfTheInputAloneLeaveEveryGradAlone) {
  expect_as_torch([](Instance& layer) { return grad({layer.loss()}, {layer.x}); });
}

TEST(GradientRules, GradientsOfParametersAreReturnedAndLeaveEveryGradAlone) {
  expect_as_torch([](Instance& layer) {
    Tensors all = grad({layer.loss()}, layer.params);
    for (const at::Tensor& param : layer.params) all.push_back(grad({layer.loss()}, {param}).front());
    return all;
  });
}

TEST(GradientRules, BackwardWithInputsReachesNothingElse) {
  expect_as_torch([](Instance& layer) {
    for (const at::Tensor& param : layer.params) {
      const at::Tensor loss = layer.loss();
      torch::autograd::backward({loss}, {}, std::nullopt, false, {param});
    }
    torch::autograd::backward({layer.loss()}, {}, std::nullopt, false, {layer.x});
    return Tensors();
  });
}

TEST(GradientRules, TensorHooksSeeAndReplaceGradients) {
  expect_as_torch([](Instance& layer) {
    Tensors seen;
    for (at::Tensor& param : layer.params) {
      param.register_hook([&seen](const at::Tensor& gradient) {
        seen.push_back(gradient.clone());
        return gradient * -0.5;
      });
    }
    layer.loss().backward();
    layer.loss().backward();
    std::ranges::sort(seen, {}, [](const at::Tensor& each) { return each.sum().item<double>(); });
    return seen;
  });
}

TEST(GradientRules, AHookOnOneParameterLeavesTheOthersAsTheyAre) {
  expect_as_torch([](Instance& layer) {
    layer.params.front().register_hook([](const at::Tensor& gradient) { return gradient * 3.0; });
    layer.loss().backward();
    layer.loss().backward();
    return Tensors();
  });
}

struct AfterAccumulation : torch::autograd::PostAccumulateGradHook {
  explicit AfterAccumulation(int& calls) : calls(calls) {}
  void operator()(const torch::autograd::Variable& param) override {
    ++calls;
    param.mutable_grad().mul_(0.25);
  }
  int& calls;
};

TEST(GradientRules, HooksAfterAccumulationRunAsTorchsDo) {
  expect_as_torch([](Instance& layer) {
    int calls = 0;
    for (const at::Tensor& param : layer.params)
      torch::autograd::impl::set_post_acc_grad_hooks(param, std::make_unique<AfterAccumulation>(calls));
    layer.loss().backward();
    layer.loss().backward();
    return Tensors({at::full({}, calls)});
  });
}

TEST(GradientRules, FrozenParametersKeepTheGradThatTheyHave) {
  expect_as_torch([](Instance& layer) {
    layer.params.back().set_requires_grad(false);
    if (const at::Tensor loss = layer.loss(); loss.requires_grad()) loss.backward();
    return Tensors();
  });
}

TEST(GradientRules, WithoutHooksTheMemoryOfAGradientStays) {
  for (const OwnLayer& layer : test::own_layers()) {
    Instance ours(layer, layer.ours, Grad::kThere);
    std::vector<const void*> places;
    for (const at::Tensor& param : ours.params) places.push_back(param.grad().const_data_ptr());
    ours.loss().backward();
    for (size_t i = 0; i < places.size(); ++i)
      EXPECT_EQ(ours.params[i].grad().const_data_ptr(), places[i]) << layer.name << " " << i;
  }
}

TEST(GradientRules, DeferralLeavesOutWhatHooksOrCallersAskFor) {
  const at::Tensor x = at::randn({5, 4}), weight = at::randn({3, 4}).requires_grad_(),
                   hooked = at::randn({3, 4}).requires_grad_();
  int calls = 0;
  hooked.register_hook([&](const at::Tensor& gradient) {
    calls += gradient.defined() ? 1 : 100;
    return gradient * 2.0;
  });
  const at::Tensor wanted = at::ones({3, 5}).mm(x);
  DeferredGradients later;
  {
    const DeferredGradients::Scope scope(later);
    (nn::linear(x, weight, {}) + nn::linear(x, hooked, {})).sum().backward();
    EXPECT_EQ(later.count(), 1);
    EXPECT_TRUE(at::allclose(hooked.grad(), 2.0 * wanted)) << "before run()";
    const Tensors returned = grad({nn::linear(x, weight, {}).sum()}, {weight});
    EXPECT_TRUE(at::allclose(returned.front(), wanted));
    EXPECT_EQ(later.count(), 1) << "what was asked for is not deferred";
  }
  EXPECT_FALSE(weight.grad().defined());
  later.run();
  EXPECT_TRUE(at::allclose(weight.grad(), wanted));
  EXPECT_EQ(calls, 1);
}

TEST(GradientRules, TheWatchSeesWhatOurLayersRead) {
  for (const OwnLayer& layer : test::own_layers()) {
    Instance ours(layer, layer.ours, Grad::kNone);
    std::set<size_t> outer;
    TouchWatch watch([&](const std::vector<size_t>& tokens, Nesting nesting) {
      if (nesting == Nesting::kOuter) outer.insert(tokens.begin(), tokens.end());
    });
    for (size_t i = 0; i < ours.params.size(); ++i) watch.mark(ours.params[i], i);
    static_cast<void>(ours.loss());
    EXPECT_EQ(outer.size(), ours.params.size()) << layer.name;
  }
}

TEST(GradientRules, WhatRunsInsideOfAnOperatorIsToldApart) {
  const at::Tensor weight = at::randn({3, 4}).requires_grad_(), bias = at::randn({3}).requires_grad_();
  std::vector<std::pair<std::vector<size_t>, Nesting>> seen;
  TouchWatch watch(
      [&](const std::vector<size_t>& tokens, Nesting nesting) { seen.emplace_back(tokens, nesting); });
  watch.mark(weight, 0);
  watch.mark(bias, 1);
  const at::Tensor x = at::randn({5, 4});
  at::linear(x, weight, bias);
  ASSERT_GT(seen.size(), 1U) << "the operator has operators inside";
  EXPECT_EQ(seen.front(), (std::pair(std::vector<size_t>{0, 1}, Nesting::kOuter)));
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_EQ(seen[i].second, Nesting::kInner);
  seen.clear();
  EXPECT_THROW(at::linear(at::randn({5, 3}), weight, bias), c10::Error);
  seen.clear();
  {
    const InUse in_use{{weight, at::Tensor()}, bias};
    weight.view({3, 4});
  }
  bias.view({3});
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0], (std::pair(std::vector<size_t>{0, 1}, Nesting::kOuter)));
  EXPECT_EQ(seen[1], (std::pair(std::vector<size_t>{0}, Nesting::kInner)));
  EXPECT_EQ(seen[2], (std::pair(std::vector<size_t>{1}, Nesting::kOuter))) << "an exception ended the other";
}

}  // namespace
}  // namespace trireme::nn
