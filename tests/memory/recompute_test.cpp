// Law 7 for recomputation: what is not kept is computed again with the same bits.
#include "trireme/memory/recompute.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace trireme
