// The ordered reduction through the communicator: its bits follow from the ranks' values alone.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/comm/group.h"

namespace trireme {
namespace {

using comm::Group;
using comm::World;
using test::run_ranks;

/// What `rank` contributes: (count) fp32 of very different sizes.
at::Tensor gradient_of(int64_t rank, int64_t count) {
  at::Tensor values = at::empty({count});
  float* out = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mix64(static_cast<uint64_t>(rank) + 100, static_cast<uint64_t>(i));
    out[i] = std::ldexp(static_cast<float>(bits >> 40) / 16777216.0f - 0.5f, static_cast<int>(bits % 18));
  }
  return values;
}

at::Tensor explicit_tree(int64_t lo, int64_t hi, int64_t count, at::ScalarType wire) {
  if (hi - lo == 1) return gradient_of(lo, count).to(wire).to(at::kFloat);
  int64_t left = 1;
  while (2 * left < hi - lo) left *= 2;
  return explicit_tree(lo, lo + left, count, wire) + explicit_tree(lo + left, hi, count, wire);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kInt), b.view(at::kInt));
}

TEST(ReduceScatterOrdered, EqualsTheExplicitTreeBitForBit) {
  const auto body = [](std::shared_ptr<World> world) {
    std::vector<int64_t> ranks;
    for (int64_t r = 0; r < world->size(); ++r) ranks.push_back(r);
    const auto group = world->make_group("all", ranks);
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      for (const int64_t m : {1, 5, 3000, 1000}) {  // a smaller one after a larger one reuses the workspace
        const int64_t count = m * world->size();
        at::Tensor output = at::full({m}, -1.0f);
        const at::Tensor input = gradient_of(world->rank(), count).to(wire);
        group->reduce_scatter_ordered(output, input);
        const at::Tensor wanted =
            explicit_tree(0, world->size(), count, wire).narrow(0, m * world->rank(), m);
        EXPECT_TRUE(same_bits(output, wanted)) << world->size() << " ranks, shard of " << m;
      }
    }
  };
  for (const bool peer_memory : test::kBothTransports) {
    for (int64_t ranks = 1; ranks <= 4; ++ranks) run_ranks(ranks, body, 20.0, 90.0, peer_memory);
  }
}

TEST(ReduceScatterOrdered, FourRanksEqualTwoByTwoContiguousGroups) {
  constexpr int64_t kCount = 4 * 777;
  run_ranks(4, [](std::shared_ptr<World> world) {
    const int64_t rank = world->rank();
    const auto all = world->make_group("all", {0, 1, 2, 3});
    const auto shard = rank < 2 ? world->make_group("shard", {0, 1}) : world->make_group("shard", {2, 3});
    const auto replicate =
        rank % 2 == 0 ? world->make_group("replicate", {0, 2}) : world->make_group("replicate", {1, 3});
    const at::Tensor mine = gradient_of(rank, kCount);

    at::Tensor flat_shard = at::empty({kCount / 4}), flat = at::empty({kCount});
    all->reduce_scatter_ordered(flat_shard, mine);
    all->all_gather(flat, flat_shard);

    at::Tensor half = at::empty({kCount / 2}), quarter = at::empty({kCount / 4});
    shard->reduce_scatter_ordered(half, mine);
    replicate->reduce_scatter_ordered(quarter, half);
    const int64_t place = 2 * shard->rank() + replicate->rank();  // half first, then the quarter of it
    EXPECT_TRUE(same_bits(quarter, flat.narrow(0, place * kCount / 4, kCount / 4))) << "rank " << rank;
  });
}

TEST(ReduceScatterOrdered, OutputMayBeASlotOfTheInput) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = world->make_group("all", {0, 1});
    at::Tensor buffer = gradient_of(world->rank(), 200);
    at::Tensor slot = buffer.narrow(0, 100 * world->rank(), 100);
    group->reduce_scatter_ordered(slot, buffer);
    EXPECT_TRUE(same_bits(slot, explicit_tree(0, 2, 200, at::kFloat).narrow(0, 100 * world->rank(), 100)));
  });
}

TEST(ReduceScatterOrdered, BothTransportsGiveTheSameBitsForAnyLength) {
  // More than a slot of shared memory holds: several rounds, the last one short.
  for (const int64_t m : {int64_t{700'001}, int64_t{2'500'000}}) {
    std::vector<std::vector<at::Tensor>> results(2, std::vector<at::Tensor>(3));
    for (const bool peer_memory : test::kBothTransports) {
      const auto body = [&](std::shared_ptr<World> world) {
        const auto group = world->make_group("all", {0, 1, 2});
        at::Tensor shard = at::empty({m}), whole = at::empty({3 * m});
        group->reduce_scatter_ordered(shard, gradient_of(world->rank(), 3 * m));
        group->all_gather(whole, shard);
        results[peer_memory ? 1 : 0][static_cast<size_t>(world->rank())] = whole;
      };
      run_ranks(3, body, 60.0, 90.0, peer_memory);
    }
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(same_bits(results[1][rank], results[0][0])) << "rank " << rank << ", shard of " << m;
    }
  }
}

TEST(ReduceScatterOrdered, ThousandsOfRoundsKeepTheRanksInStep) {
  run_ranks(4, [](std::shared_ptr<World> world) {
    const auto group = world->make_group("all", {0, 1, 2, 3});
    at::Tensor input = at::empty({4}), shard = at::empty({1}), whole = at::empty({4});
    for (int64_t round = 0; round < 3000; ++round) {
      input.fill_(static_cast<float>(round + world->rank()));
      group->reduce_scatter_ordered(shard, input);
      group->all_gather(whole, shard);
      ASSERT_TRUE(same_bits(whole, at::full({4}, static_cast<float>(4 * round + 6)))) << "round " << round;
    }
  });
}

TEST(ReduceScatterOrdered, WorkspaceIsKeptBetweenCalls) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = world->make_group("all", {0, 1});
    const void* const large = group->scratch(4096).const_data_ptr();
    EXPECT_EQ(group->scratch(100).const_data_ptr(), large);
    EXPECT_GE(group->scratch(8192).numel(), 8192);
  });
}

}  // namespace
}  // namespace trireme
