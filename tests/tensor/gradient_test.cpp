// The autograd form: gradients against those of dense computations by torch.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/refusal.h"
#include "tests/tensor/parts.h"
#include "trireme/tensor/redistribute.h"

namespace trireme {
namespace {

using comm::Group;
using comm::World;
using plan::Placed;
using plan::Shape;
using plan::TensorPlacement;
using tensor::redistribute;
using test::all_placements;
using test::expect_part;
using test::expect_refusal;
using test::group_of_all;
using test::part_of;
using test::run_ranks;
using test::whole_numbers;

const TensorPlacement kReplicated = TensorPlacement::replicate(), kSum = TensorPlacement::partial(),
                      kFirst = TensorPlacement::shard(0), kSecond = TensorPlacement::shard(1);
/// Every rank has it, and computes the same with it; or its share of what follows.
const Placed kSame = {kReplicated, kReplicated}, kUsedInParts = {kReplicated, kSum};
/// Ranks' terms of a sum, with which all compute the same.
const Placed kTerms = {kSum, kReplicated};
const Placed kFirstSplit = {kFirst, kFirst}, kSecondSplit = {kSecond, kSecond};

std::string in_words(const Placed& placed) {
  return fmt::format("{}/{}", plan::to_text(placed.value), plan::to_text(placed.gradient));
}

std::vector<Placed> all_placed(int64_t dims) {
  std::vector<Placed> all;
  for (const TensorPlacement& value : all_placements(dims)) {
    for (const TensorPlacement& gradient : all_placements(dims)) {
      if (value == gradient || (!value.is_shard() && !gradient.is_shard())) all.push_back({value, gradient});
    }
  }
  return all;
}

int64_t bytes_between(const Group& group) {
  int64_t sum = 0;
  for (const auto& [kind, traffic] : group.traffic()) sum += traffic.bytes;
  return sum;
}

/// Whatever the placements are, the whole does not change, so nor does its gradient.
TEST(RedistributeGradient, EveryPairBringsTheSameGradient) {
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      const auto group = group_of_all(*world);
      for (const Shape& shape : {Shape{12, 12}, Shape{5, 3}, Shape{1, 7}, Shape{0, 3}}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
          const at::Tensor whole = whole_numbers(1, shape, dtype), d_whole = whole_numbers(2, shape, dtype);
          for (const Placed& from : all_placed(2)) {
            for (const Placed& to : all_placed(2)) {
              const std::string what =
                  fmt::format("{} -> {} of ({})", in_words(from), in_words(to), fmt::join(shape, ", "));
              const at::Tensor x = part_of(whole, from.value, group->rank(), ranks).requires_grad_();
              const at::Tensor y = redistribute(x, from, to, group, shape);
              expect_part(y.detach(), whole, to.value, *group, what);
              const int64_t before = bytes_between(*group);
              y.backward(part_of(d_whole, to.gradient, group->rank(), ranks));
              EXPECT_EQ(bytes_between(*group) - before,
                        plan::redistribute_bytes(to.gradient, from.gradient, shape,
                                                 static_cast<int64_t>(whole.element_size()), ranks))
                  << what;
              expect_part(x.grad(), d_whole, from.gradient, *group, "gradient: " + what);
            }
          }
        }
      }
    });
  }
}

/// (rows, 6) -> (rows, 4).
struct TwoLinears {
  at::Tensor up, down;  ///< (6, 10), (10, 4)

  explicit TwoLinears() : up(at::randn({6, 10})), down(at::randn({10, 4})) {}
  static at::Tensor inner(const at::Tensor& x, const at::Tensor& up_part, const at::Tensor& down_part) {
    return at::matmul(at::tanh(at::matmul(x, up_part)), down_part);
  }
};

void expect_near(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(got, wanted, 1e-5, 1e-6)) << what << ": " << got << "\ninstead of\n" << wanted;
}

/// Tensor parallelism as of Shoeybi et al. (2019): the first matrix is split along its columns, the second
/// along its rows; between blocks every rank has all tokens, or (Korthikanti et al. 2022) its share of them.
TEST(RedistributeGradient, LinearsInPartsAreTheDenseOnes) {
  constexpr int64_t kTokens = 7;
  at::manual_seed(3);
  const TwoLinears dense;
  const at::Tensor x = at::randn({kTokens, 6}), target = at::randn({kTokens, 4});
  const auto leaf = [](const at::Tensor& values) { return values.clone().requires_grad_(); };
  const at::Tensor wanted_x = leaf(x), wanted_up = leaf(dense.up), wanted_down = leaf(dense.down);
  const at::Tensor wanted = TwoLinears::inner(wanted_x, wanted_up, wanted_down) + wanted_x.narrow(1, 0, 4);
  (wanted - target).square().sum().backward();

  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    for (const Placed& outside : {kSame, kFirstSplit}) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        const auto group = group_of_all(*world);
        const auto mine = [&](const at::Tensor& values, const TensorPlacement& placement) {
          return part_of(values, placement, group->rank(), ranks);
        };
        const at::Tensor x_part = leaf(mine(x, outside.value)), up = leaf(mine(dense.up, kSecond)),
                         down = leaf(mine(dense.down, kFirst));
        const at::Tensor inside = redistribute(x_part, outside, kUsedInParts, group, {kTokens, 6});
        const at::Tensor terms = TwoLinears::inner(inside, up, down);
        const at::Tensor y = redistribute(terms, kTerms, outside, group) + x_part.narrow(1, 0, 4);
        (y - mine(target, outside.value)).square().sum().backward();

        const std::string what = fmt::format("{} ranks, {} outside", ranks, in_words(outside));
        expect_near(y, mine(wanted.detach(), outside.value), what);
        expect_near(x_part.grad(), mine(wanted_x.grad(), outside.gradient), what + ": dx");
        expect_near(up.grad(), mine(wanted_up.grad(), kSecond), what + ": d_up");
        expect_near(down.grad(), mine(wanted_down.grad(), kFirst), what + ": d_down");
      });
    }
  }
}

/// Rows on the ranks, columns where all rows are needed, and back, as in Ulysses (Jacobs et al. 2023).
TEST(RedistributeGradient, ExchangedDimensionsAreTheDenseOnes) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({5, 6}), dy = at::randn({5, 6}), wanted_x = x.clone().requires_grad_();
  const at::Tensor wanted = at::softmax(wanted_x.square(), 0);
  wanted.backward(dy);
  for (int64_t ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      const auto group = group_of_all(*world);
      const at::Tensor rows = part_of(x, kFirst, group->rank(), ranks).requires_grad_();
      const at::Tensor columns = redistribute(rows.square(), kFirstSplit, kSecondSplit, group, {5, 6});
      const at::Tensor y = redistribute(at::softmax(columns, 0), kSecondSplit, kFirstSplit, group, {5, 6});
      y.backward(part_of(dy, kFirst, group->rank(), ranks));
      expect_near(y, part_of(wanted.detach(), kFirst, group->rank(), ranks), "y");
      expect_near(rows.grad(), part_of(wanted_x.grad(), kFirst, group->rank(), ranks), "dx");
    });
  }
}

TEST(RedistributeGradient, AnExpandedGradientAndAGroupThatOnlyTheGraphKeeps) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    auto group = group_of_all(*world);
    const at::Tensor rows = at::ones({2, 5}).requires_grad_();
    const at::Tensor whole = redistribute(rows, kFirstSplit, kUsedInParts, group);
    group.reset();
    whole.sum().backward();  // a gradient of one element in memory
    EXPECT_TRUE(at::equal(rows.grad(), at::full({2, 5}, 3.0)));
  });
}

TEST(RedistributeGradient, NothingIsRecordedOrSentForNothing) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    const at::Tensor x = at::ones({4, 4}).requires_grad_();
    EXPECT_TRUE(redistribute(x, kSame, kSame, group).is_same(x));
    EXPECT_FALSE(redistribute(x.detach(), kFirstSplit, kSame, group).requires_grad());
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(redistribute(x, kFirstSplit, kSame, group).requires_grad());
  });
  run_ranks(1, [](std::shared_ptr<World> world) {
    const at::Tensor x = at::ones({4, 4}).requires_grad_();
    EXPECT_TRUE(redistribute(x, kTerms, kSecondSplit, group_of_all(*world)).is_same(x));
  });
}

TEST(RedistributeGradient, AResultThatSharesMemoryIsNotOverwrittenUnseen) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const at::Tensor x = at::ones({4, 4}).requires_grad_();
    at::Tensor rows = redistribute(x * 2, kSame, kFirstSplit, group_of_all(*world));
    EXPECT_THROW(rows.mul_(3), c10::Error);
  });
}

TEST(RedistributeGradient, RefusesWhatHasNoGradient) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    const std::string place = "[tensor.redistribute]";
    const at::Tensor x = at::ones({4, 4}).requires_grad_();
    expect_refusal(
        [&] {
          redistribute(x, {kFirst, kReplicated}, kSame, group);
        },
        {place, "value is S(0)", "gradient R", "same placement"});
    expect_refusal(
        [&] {
          redistribute(x, kSame, {kSum, kSecond}, group);
        },
        {place, "value is P", "gradient S(1)"});
    expect_refusal(
        [&] {
          redistribute(x, {kFirst, kSecond}, kSame, group);
        },
        {place, "value is S(0)", "gradient S(1)"});
    expect_refusal([&] { redistribute(x.to(at::kHalf), kFirstSplit, kUsedInParts, group); },
                   {place, "P -> S(0) of (8, 4)", "Half", "fp32 or bf16"});
    expect_refusal([&] { redistribute(x, kSame, kSame, nullptr); }, {place, "no group"});
    const at::Tensor sum = redistribute(x, kFirstSplit, kUsedInParts, group).sum();
    expect_refusal(
        [&] { torch::autograd::grad({sum}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true); },
        {place, "create_graph"});
    sum.backward();
    EXPECT_TRUE(at::equal(x.grad(), at::full({4, 4}, 2.0))) << "the ranks are still in step";
  });
}

}  // namespace
}  // namespace trireme
