// Law 7 for recomputation: what is not kept is computed again with the same bits.
#include "trireme/memory/recompute.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/refusal.h"
#include "tests/support/tiny_training.h"
#include "trireme/plan/model_family.h"

namespace trireme {
namespace {

using test::TinyRun;
using test::train_tiny;

TEST(Recompute, TrainsTheSameBitsUnderEveryPolicy) {
  for (const plan::ModelFamily family : plan::language_families()) {
    for (const char* policy : {"ddp", "zero2", "fsdp"}) {
      for (const auto compute : {at::kFloat, at::kBFloat16}) {
        TinyRun run{.policy = policy, .family = family, .steps = 4, .accumulation = 2, .compute = compute};
        const std::string kept = train_tiny(run).digest;
        for (const plan::Recompute recompute :
             {plan::Recompute::kBlock, plan::Recompute::kAllButAttention, plan::Recompute::kCheap}) {
          run.recompute = recompute;
          EXPECT_EQ(train_tiny(run).digest, kept)
              << plan::name(family) << " " << policy << " " << name(recompute);
        }
      }
    }
  }
}

TEST(Recompute, DrawsTheSameDropoutAgain) {
  const auto digest = [](plan::Recompute recompute) {
    at::manual_seed(5);
    return train_tiny({.ranks = 1, .steps = 4, .recompute = recompute, .dropout = 0.2}).digest;
  };
  const std::string kept = digest(plan::Recompute::kNone);
  EXPECT_EQ(digest(plan::Recompute::kBlock), kept);
  EXPECT_EQ(digest(plan::Recompute::kCheap), kept);
}

TEST(Recompute, GivesParametersTheirGradientsWhereTheInputNeedsNone) {
  const at::Tensor weight = at::ones({3, 3}).requires_grad_(), x = at::ones({2, 3});
  memory::recomputed(x, [&](const at::Tensor& in) { return at::mm(in, weight); }).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({3, 3}, 2.0f)));
}

TEST(Recompute, RemembersRandomNumbersOnlyWhereSomeAreDrawn) {
  const auto gradient = [](bool draws) {
    at::manual_seed(5);
    const at::Tensor x = at::ones({64}).requires_grad_();
    const auto noisy = [](const at::Tensor& in) { return in * at::rand({64}); };
    const at::Tensor y = memory::recomputed(x, noisy, draws);
    y.sum().backward();
    return at::equal(x.grad(), y.detach());
  };
  EXPECT_TRUE(gradient(true));
  EXPECT_FALSE(gradient(false)) << "said to draw nothing, it draws other numbers the second time";
}

TEST(Recompute, RunsForwardOnceWithoutGradientsAndTwiceWithThem) {
  int64_t calls = 0;
  const at::Tensor x = at::ones({2}).requires_grad_();
  const auto twice = [&](const at::Tensor& in) {
    ++calls;
    return in * 2.0;
  };
  {
    const at::NoGradGuard no_grad;
    memory::recomputed(x, twice);
  }
  EXPECT_EQ(calls, 1);
  memory::recomputed(x, twice).sum().backward();
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 2.0f)));
}

TEST(Recompute, OfAFrozenBlockLetsWhatFollowsTrain) {
  const at::Tensor frozen = at::full({3, 3}, 2.0f), head = at::ones({3, 3}).requires_grad_();
  const at::Tensor x = at::ones({2, 3});
  const at::Tensor y = memory::recomputed(x, [&](const at::Tensor& in) { return at::matmul(in, frozen); });
  at::matmul(y, head).sum().backward();
  EXPECT_TRUE(at::equal(head.grad(), at::full({3, 3}, 12.0f)));
}

TEST(Recompute, RefusesPassesThatItWouldGetWrong) {
  const at::Tensor weight = at::full({3, 3}, 2.0f).requires_grad_(), x = at::ones({2, 3}).requires_grad_();
  const auto loss = [&] {
    return memory::recomputed(x, [&](const at::Tensor& in) { return at::mm(in, weight).square(); }).sum();
  };
  test::expect_refusal([&] { loss().backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
                       {"[memory.recomputed] backward was called with create_graph", "without recomputed()"});
  test::expect_refusal(
      [&] { torch::autograd::grad({loss()}, {x}); },
      {"[memory.recomputed] gradients were asked for of certain tensors only", "autograd::grad"});
  test::expect_refusal(
      [&] { loss().backward({}, std::nullopt, /*create_graph=*/false, std::vector<at::Tensor>{x}); },
      {"[memory.recomputed] gradients were asked for of certain tensors only", "backward with inputs"});
  EXPECT_FALSE(weight.grad().defined());
  loss().backward();
  EXPECT_TRUE(weight.grad().defined() && x.grad().defined()) << "a plain pass works after a refusal";
}

/// Autocast of a CPU to bf16 while it lives, as torch.autocast does it.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(Recompute, ComputesUnderTheAutocastOfForwardAgain) {
  const at::Tensor x = at::randn({8, 16}), weights = at::randn({16, 4});
  std::vector<at::Tensor> grads;
  for (const bool recompute : {false, true}) {
    for (const bool backward_inside : {false, true}) {
      const at::Tensor weight = weights.clone().requires_grad_();
      std::vector<at::ScalarType> seen;
      const auto forward = [&](const at::Tensor& in) {
        const at::Tensor y = at::mm(in, weight);
        seen.push_back(y.scalar_type());
        return y;
      };
      std::optional<Autocast> autocast(std::in_place);
      const at::Tensor y = recompute ? memory::recomputed(x, forward) : forward(x);
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      if (!backward_inside) autocast.reset();
      y.to(at::kFloat).square().sum().backward();
      EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), backward_inside) << "as before backward";
      for (const at::ScalarType dtype : seen) EXPECT_EQ(dtype, at::kBFloat16);
      ASSERT_TRUE(weight.grad().defined()) << recompute << backward_inside;
      grads.push_back(weight.grad());
    }
  }
  for (const at::Tensor& grad : grads) EXPECT_TRUE(at::equal(grad, grads.front()));
}

TEST(Recompute, TakesTokens) {
  const at::Tensor table = at::ones({5, 3}).requires_grad_(), tokens = at::tensor({1, 1, 4}, at::kLong);
  memory::recomputed(tokens, [&](const at::Tensor& in) { return at::embedding(table, in); }).sum().backward();
  EXPECT_TRUE(at::equal(table.grad().sum(1), at::tensor({0.0f, 6.0f, 0.0f, 0.0f, 3.0f})));
}

}  // namespace
}  // namespace trireme
