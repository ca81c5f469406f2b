// Every pair of placements against torch's slices and sums of the whole tensor, with ranks as threads.
#include "trireme/tensor/redistribute.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "tests/support/refusal.h"
#include "tests/tensor/parts.h"

namespace trireme {
namespace {

using comm::Group;
using comm::World;
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

const TensorPlacement kReplicate = TensorPlacement::replicate(), kPartial = TensorPlacement::partial(),
                      kRows = TensorPlacement::shard(0), kColumns = TensorPlacement::shard(1);

const std::vector<Shape> kEven = {{12}, {12, 24}, {24, 12, 12}, {0, 12}, {12, 0, 12}, {}};
const std::vector<Shape> kUneven = {{1}, {7}, {17, 5}, {1, 2}, {1, 12, 12}, {3, 12, 2}, {2, 1, 5, 3}, {5, 0}};

void for_groups(const std::function<void(Group&)>& body) {
  for (const bool peer_memory : test::kBothTransports) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) {
      run_ranks(
          ranks, [&](std::shared_ptr<World> world) { body(*group_of_all(*world)); }, 20.0, 90.0, peer_memory);
    }
  }
}

template <typename Body>
void for_pairs(const Shape& shape, const Body& body) {
  const auto placements = all_placements(std::ssize(shape));
  for (const TensorPlacement& from : placements) {
    for (const TensorPlacement& to : placements)
      body(from, to,
           fmt::format("{} -> {} of ({})", plan::to_text(from), plan::to_text(to), fmt::join(shape, ", ")));
  }
}

int64_t bytes_sent(const Group& group) {
  int64_t sum = 0;
  for (const auto& [kind, traffic] : group.traffic()) sum += traffic.bytes;
  return sum;
}

int64_t calls(const Group& group) {
  int64_t sum = 0;
  for (const auto& [kind, traffic] : group.traffic()) sum += traffic.calls;
  return sum;
}

at::Tensor bits(const at::Tensor& values) {
  return values.contiguous().view({-1}).view(at::kByte);
}

/// The same values with the dimensions in memory the other way round, and gaps between elements.
at::Tensor scattered_in_memory(const at::Tensor& values) {
  if (values.dim() == 0) return values;
  std::vector<int64_t> reversed(static_cast<size_t>(values.dim()));
  std::iota(reversed.rbegin(), reversed.rend(), 0);
  at::Tensor memory =
      at::empty_like(values.permute(reversed), at::MemoryFormat::Contiguous).repeat_interleave(2, 0);
  at::Tensor result = memory.slice(0, 0, memory.size(0), 2).permute(reversed);
  return result.copy_(values);
}

TEST(Redistribute, EveryPairHoldsTheSameWhole) {
  for_groups([](Group& group) {
    const auto try_all = [&](const Shape& shape, bool even) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const at::Tensor whole = whole_numbers(1, shape, dtype);
        for_pairs(shape,
                  [&](const TensorPlacement& from, const TensorPlacement& to, const std::string& what) {
                    const at::Tensor local = part_of(whole, from, group.rank(), group.size());
                    const at::Tensor before = local.clone();
                    expect_part(redistribute(local, from, to, group, shape), whole, to, group, what);
                    if (even) expect_part(redistribute(local, from, to, group), whole, to, group, what);
                    expect_part(redistribute(scattered_in_memory(local), from, to, group, shape), whole, to,
                                group, "not contiguous: " + what);
                    EXPECT_TRUE(at::equal(local, before)) << "written to: " << what;
                  });
      }
    };
    for (const Shape& shape : kEven) try_all(shape, true);
    for (const Shape& shape : kUneven) try_all(shape, false);
  });
}

TEST(Redistribute, WhatIsNotSummedMayHaveAnyDtype) {
  for_groups([](Group& group) {
    for (const at::ScalarType dtype : {at::kHalf, at::kDouble, at::kLong, at::kBool, at::kByte}) {
      const Shape shape = {7, 4};
      const at::Tensor whole = whole_numbers(1, shape, at::kFloat).to(dtype);
      for_pairs(shape, [&](const TensorPlacement& from, const TensorPlacement& to, const std::string& what) {
        if (from.is_partial() || to.is_partial()) return;
        const at::Tensor local = part_of(whole, from, group.rank(), group.size());
        expect_part(redistribute(local, from, to, group, shape), whole, to, group, what);
      });
    }
  });
}

TEST(Redistribute, ResultsAreContiguous) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    for (const Shape& shape : {Shape{3, 2, 3}, Shape{4, 5, 7}}) {
      const at::Tensor whole = whole_numbers(1, shape);
      for_pairs(shape, [&](const TensorPlacement& from, const TensorPlacement& to, const std::string& what) {
        const at::Tensor local = scattered_in_memory(part_of(whole, from, group->rank(), 3));
        const at::Tensor result = redistribute(local, from, to, *group, shape);
        EXPECT_TRUE(from == to ? result.is_same(local) || result.is_alias_of(local) : result.is_contiguous())
            << what;
      });
    }
  });
}

TEST(Redistribute, BitsOfASumDoNotDependOnTheWay) {
  for_groups([](Group& group) {
    for (const Shape& shape : {Shape{12, 12}, Shape{7, 5}, Shape{129, 33}}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        // Magnitudes differ, so that every order of summation rounds to other bits.
        const at::Tensor local = (whole_numbers(group.rank(), shape).div(7.0).exp() *
                                  std::pow(10.0, static_cast<double>(group.rank() % 3)))
                                     .to(dtype);
        const at::Tensor whole = redistribute(local, kPartial, kReplicate, group, shape);
        for (const TensorPlacement& between : {kRows, kColumns}) {
          const at::Tensor slice = redistribute(local, kPartial, between, group, shape);
          const at::Tensor again = redistribute(slice, between, kReplicate, group, shape);
          EXPECT_TRUE(at::equal(bits(whole), bits(again))) << plan::to_text(between) << " " << dtype;
        }
        at::Tensor everyone = at::empty({group.size(), local.numel()}, local.options());
        group.all_gather(everyone, local);
        const at::Tensor exact = everyone.to(at::kDouble).sum(0).view(shape);
        const double rounding = dtype == at::kFloat ? 1e-6 : 0x1p-8;
        EXPECT_LE(((whole.to(at::kDouble) - exact) / exact).abs().max().item<double>(), rounding) << dtype;
        if (group.size() > 1 && dtype == at::kBFloat16) {
          const at::Tensor once = everyone.to(at::kDouble).sum(0).to(at::kFloat).to(dtype).view(shape);
          EXPECT_LE((whole != once).sum().item<int64_t>(), whole.numel() / 500)
              << "rounded once, but for ties between fp32 sums";
        }
      }
    }
  });
}

TEST(Redistribute, CountedBytesAreThePlannedOnes) {
  for_groups([](Group& group) {
    const auto count_all = [&](const Shape& shape, bool even) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const at::Tensor whole = whole_numbers(1, shape, dtype);
        const auto element = static_cast<int64_t>(whole.element_size());
        for_pairs(shape, [&](const TensorPlacement& from, const TensorPlacement& to,
                             const std::string& what) {
          const at::Tensor local = part_of(whole, from, group.rank(), group.size());
          const int64_t before = bytes_sent(group);
          redistribute(local, from, to, group, shape);
          const int64_t sent = bytes_sent(group) - before;
          EXPECT_EQ(sent, plan::redistribute_bytes(from, to, shape, element, group.size())) << what;
          if (!even) return;
          EXPECT_EQ(sent, plan::redistribute_bytes(from, to, element * whole.numel(), group.size())) << what;
        });
      }
    };
    for (const Shape& shape : {Shape{12, 12}, Shape{24, 12, 12}}) count_all(shape, true);
    for (const Shape& shape : kUneven) count_all(shape, false);
  });
}

TEST(Redistribute, TalksNoMoreThanItMust) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    const at::Tensor whole = whole_numbers(1, {6, 9});
    for_pairs({6, 9}, [&](const TensorPlacement& from, const TensorPlacement& to, const std::string& what) {
      const at::Tensor local = part_of(whole, from, group->rank(), 3);
      const int64_t before = calls(*group);
      redistribute(local, from, to, *group);
      const bool silent = from == to || from.is_replicate() || to.is_partial();
      EXPECT_EQ(calls(*group) - before, silent ? 0 : from.is_partial() && to.is_replicate() ? 2 : 1) << what;
    });
    EXPECT_TRUE(redistribute(whole, kReplicate, kRows, *group).is_alias_of(whole))
        << "rows are there already";
  });
}

TEST(Redistribute, AutogradDoesNotSeeThePlainForm) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    const at::Tensor local = at::ones({4, 4}).requires_grad_();
    for_pairs({4, 4}, [&](const TensorPlacement& from, const TensorPlacement& to, const std::string& what) {
      EXPECT_FALSE(redistribute(local, from, to, *group).requires_grad()) << what;
    });
  });
}

TEST(Redistribute, RefusesWhatCannotBeBeforeAnyoneWaits) {
  for (int64_t ranks = 1; ranks <= 2; ++ranks) {
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      const auto group = group_of_all(*world);
      const std::string place = "[tensor.redistribute]", rank = fmt::format("rank {}", group->rank());
      const at::Tensor x = at::ones({4, 6});
      const auto refused = [&](const at::Tensor& local, const TensorPlacement& from,
                               const TensorPlacement& to, at::IntArrayRef whole,
                               const std::vector<std::string>& words) {
        expect_refusal([&] { redistribute(local, from, to, *group, whole); }, words);
      };
      refused(x, TensorPlacement::shard(2), kReplicate, {}, {place, rank, "S(2) -> R", "(4, 6)", "has 2"});
      refused(x, kReplicate, TensorPlacement::shard(-1), {}, {place, rank, "R -> S(-1)", "(4, 6)"});
      refused(at::ones({}), kPartial, kRows, {}, {place, rank, "P -> S(0)", "has 0"});
      refused(x, kReplicate, kRows, {4, 7}, {place, rank, "R -> S(0)", "R of (4, 7) has (4, 7)", "(4, 6)"});
      refused(x, kPartial, kRows, {4}, {place, rank, "P -> S(0)", "P of (4) has (4)", "(4, 6)"});
      refused(x, kRows, kReplicate, {4 * ranks + 2, 6}, {place, rank, "S(0) -> R", "(4, 6)"});
      refused(x, kRows, kReplicate, {4 * ranks, 7}, {place, rank, "has (4, 7) on this rank", "(4, 6)"});
      refused(x, kColumns, kRows, {4}, {place, rank, "S(1) -> S(0)", "(4, 6)"});
      for (const at::ScalarType dtype : {at::kHalf, at::kDouble, at::kLong}) {
        refused(x.to(dtype), kPartial, kReplicate, {}, {place, rank, "P -> R", c10::toString(dtype), "bf16"});
        refused(x.to(dtype), kPartial, kColumns, {},
                {place, rank, "P -> S(1)", c10::toString(dtype), "bf16"});
      }
      EXPECT_EQ(calls(*group), 0);
    });
  }
}

TEST(Redistribute, RanksThatDisagreeAreToldEvenWhereTheirBytesAreTheSame) {
  const auto refused = [](const auto& call) {
    EXPECT_THROW(run_ranks(2,
                           [&](std::shared_ptr<World> world) {
                             const auto group = group_of_all(*world);
                             call(*group);
                           }),
                 CommError);
  };
  refused([](Group& group) {
    redistribute(at::ones({4, 4}), group.rank() == 0 ? kRows : kColumns, kReplicate, group);
  });
  refused([](Group& group) {
    redistribute(at::ones({2, 4}), kRows, kReplicate, group, {group.rank() == 0 ? 3 : 4, 4});
  });
}

}  // namespace
}  // namespace trireme
