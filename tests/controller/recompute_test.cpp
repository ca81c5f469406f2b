// Activations that are computed again: the values and gradients of those that are kept, in less memory.
#include "trireme/gt/recompute.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>
#include <tuple>
#include <utility>

#include "tests/controller/one_worker.h"
#include "tests/controller/trained_mini_gpt.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/gt/signal.h"
#include "trireme/kernels/allocation_watch.h"

namespace trireme {
namespace {

TEST(Recompute, OfBlocksHasTheBitsOfActivationsThatAreKept) {
  const std::tuple<int64_t, int64_t, const char*, gt::Dtype> ways[] = {
      {1, 1, "", gt::Dtype::kFp32},     {2, 1, "", gt::Dtype::kFp32},      {4, 1, "", gt::Dtype::kBf16},
      {2, 2, "1f1b", gt::Dtype::kBf16}, {1, 4, "zb_h1", gt::Dtype::kFp32}, {1, 4, "gpipe", gt::Dtype::kFp32}};
  for (const auto& [tp, stages, schedule, products] : ways) {
    for (const bool captured : {false, true}) {
      const std::string what = fmt::format("tp={} pp={} {} {} {}", tp, stages, schedule, products, captured);
      const Way way{.schedule = schedule, .products = products, .steps = 6, .captured = captured};
      mini_gpt::Config config = with_stages(stages);
      const Outcome kept = run_mesh(config, tp, way);
      config.recompute = true;
      const Outcome again = run_mesh(config, tp, way);
      EXPECT_EQ(again.losses, kept.losses) << what;
      EXPECT_EQ(again.norms, kept.norms) << what;
      EXPECT_EQ(again.end, kept.end) << what;
      EXPECT_NE(again.hash, kept.hash) << what << ": nothing was done again";
      EXPECT_EQ(again.replays, kept.replays) << what;
    }
  }
}

/// Sixteen passes over 4 MiB in four pieces: of each what goes in is kept, and of one at a time the rest.
TEST(Recompute, KeepsWhatGoesInAndComesOut) {
  with_one_worker([] {
    gt::Tensor weight = gt::full({1024, 1024}, 0.5);
    weight.requires_grad_();
    const auto peak_of = [&](bool again) {
      const kernels::AllocationWatch watch;
      gt::Tensor x = weight * 1.0;
      for (int64_t piece = 0; piece < 4; ++piece) {
        const auto body = [&] { return gt::sigmoid(gt::sigmoid(gt::sigmoid(gt::sigmoid(x)))); };
        x = again ? gt::recompute(body) : body();
      }
      x.sum().backward();
      return static_cast<double>(watch.peak()) / (4 << 20);
    };
    peak_of(false);
    const double kept = peak_of(false), again = peak_of(true);
    EXPECT_GE(kept, 16);
    EXPECT_LT(again, 13);
  });
}

TEST(Recompute, HasTheGradientsOfTheFunction) {
  with_one_worker([] {
    const auto gradient_of = [](const std::function<gt::Tensor(const gt::Tensor&, const gt::Tensor&)>& loss) {
      gt::manual_seed(3);
      gt::Tensor a = gt::randn({4, 4}), b = gt::randn({4, 4});
      a.requires_grad_();
      b.requires_grad_();
      loss(a, b).backward();
      return std::pair(a.grad().fetch().floats(), b.grad().fetch().floats());
    };
    const auto inner = [](const gt::Tensor& x, const gt::Tensor& b) {
      return gt::dropout(gt::tanh(gt::matmul(x, b)), 0.5, 11) * b;
    };
    const auto plain = gradient_of(
        [&](const gt::Tensor& a, const gt::Tensor& b) { return (inner(inner(gt::exp(a), b), b) + b).sum(); });
    // One in another, two results in one sum, and a parameter that is used outside, too.
    const auto again = gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
      const gt::Tensor x = gt::exp(a);
      const gt::Tensor y = gt::recompute([&] {
        const gt::Tensor once = gt::recompute([&] { return inner(x, b); });
        return inner(once, b);
      });
      return (y + b).sum();
    });
    EXPECT_EQ(again.first, plain.first);
    for (size_t i = 0; i < plain.second.size(); ++i)  // added up in another order
      EXPECT_NEAR(again.second[i], plain.second[i], 1e-5 * std::abs(plain.second[i]));
    // A seed that is drawn inside is drawn once.
    const auto noise = [](const gt::Tensor& x) { return gt::square(x * gt::randn({4, 4})); };
    EXPECT_EQ(gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                return gt::recompute([&] { return noise(a + b); }).sum();
              }),
              gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) { return noise(a + b).sum(); }));
    // A value that has no gradient inside has none outside.
    EXPECT_EQ(gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                return gt::recompute([&] {
                         const gt::Tensor scale = [&] {
                           const gt::no_grad none;
                           return gt::exp(b);
                         }();
                         return a * scale * b;
                       })
                    .sum();
              }),
              gradient_of([&](const gt::Tensor& a, const gt::Tensor& b) {
                const gt::Tensor scale = [&] {
                  const gt::no_grad none;
                  return gt::exp(b);
                }();
                return (a * scale * b).sum();
              }));
  });
}

/// Gradients of weights wait under this schedule, and of nothing else: not of a result that is the second
/// factor.
TEST(Recompute, OfASecondFactorHasItsGradientInTime) {
  std::vector<std::vector<float>> gradients;
  for (const char* name : {"gpipe", "zb_h1"}) {
    for (const bool again : {false, true}) {
      std::mutex mutex;
      test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
        const gt::Workers workers(std::make_shared<controller::RankProgram>(world),
                                  {.signals = signals_file(with_stages(2), 1, 2)});
        gt::manual_seed(3);
        gt::Tensor first = gt::randn({4, 4}), second = gt::randn({4, 4});
        first.requires_grad_();
        second.requires_grad_();
        gt::schedule(name, 2, [&](int64_t) {
          gt::Tensor x;
          {
            const gt::signal::context scope("pp_stage0");
            x = gt::matmul(gt::ones({4, 4}), first);
          }
          {
            const gt::signal::context boundary("stage0_to_stage1");
            x = gt::here(x);
          }
          const gt::signal::context scope("pp_stage1");
          const auto q = [&] { return gt::matmul(x, second); };
          const auto k = [&] { return gt::tanh(gt::matmul(x, second)); };
          return gt::matmul(again ? gt::recompute(q) : q(), again ? gt::recompute(k) : k()).sum();
        });
        std::vector<float> found = first.grad().fetch().floats();
        for (const float one : second.grad().fetch().floats()) found.push_back(one);
        const std::lock_guard lock(mutex);
        gradients.push_back(found);
      });
    }
  }
  for (const std::vector<float>& found : gradients) {
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], gradients[0][i], 1e-5 * std::abs(gradients[0][i])) << i;
  }
}

TEST(Recompute, IsTheCallAloneWhereNothingHasGradients) {
  with_one_worker([] {
    gt::Tensor a = gt::ones({2, 2});
    EXPECT_EQ(gt::recompute([&] { return a + 1.0; }).sum().item(), 8);
    a.requires_grad_();
    EXPECT_EQ(gt::recompute([&] { return a; }).sum().item(), 4);
    {
      const gt::no_grad none;
      EXPECT_EQ(gt::recompute([&] { return a * 3.0; }).sum().item(), 12);
    }
    gt::recompute([&] { return a * 3.0; }).sum().backward();
    EXPECT_EQ(a.grad().sum().item(), 12);
  });
}

TEST(Recompute, RefusesWhatCannotBeDoneAgain) {
  with_one_worker([] {
    gt::Tensor a = gt::ones({2, 2}), other = gt::ones({2, 2});
    a.requires_grad_();
    test::expect_refusal([&] { gt::recompute([&] { return a + gt::Tensor(other).add_(other); }); },
                         {"[gt.recompute]", "writes a tensor", "do it outside"});
    test::expect_refusal(
        [&] {
          gt::recompute([&] {
            a.sum().backward();
            return a;
          });
        },
        {"[gt.recompute]", "differentiates"});
    test::expect_refusal([&] { gt::recompute([] { return gt::Tensor(); }); }, {"[gt.recompute]", "empty"});
    const gt::Tensor x = gt::exp(a), y = gt::recompute([&] { return gt::tanh(x); });
    test::expect_refusal([&] { (x + y).sum().backward(); },
                         {"[gt.backward]", "what went into", "inside of it"});
    const gt::Tensor sum = gt::recompute([&] { return a * other; }).sum();
    {
      const gt::no_grad none;
      other.add_(a);
    }
    test::expect_refusal([&] { sum.backward(); },
                         {"[gt.backward]", "was written before", "behind backward()"});
    test::expect_refusal(
        [&] {
          gt::Tensor inside;
          const gt::Tensor result = gt::recompute([&] { return (inside = gt::exp(a)) * 2.0; });
          (result.sum() + inside.sum()).backward();
        },
        {"[gt.recompute]", "is used outside", "return it"});
    test::expect_refusal(
        [&] {
          gt::recompute([&] {
            gt::Tensor inside = a * 2.0;
            inside.requires_grad_();
            return inside;
          });
        },
        {"[gt.recompute]", "cannot collect a gradient"});
    // The program goes on.
    a.zero_grad();
    gt::recompute([&] { return a * other; }).sum().backward();
    EXPECT_EQ(a.grad().sum().item(), 8);
  });
}

}  // namespace
}  // namespace trireme
