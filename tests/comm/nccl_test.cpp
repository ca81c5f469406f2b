// The same laws on GPUs over NCCL, two ranks as processes; skipped where fewer GPUs are found.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>

#include "tests/comm/gpu_ranks.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/kernels/tree_sum.h"

namespace trireme {
namespace {

using comm::Group;
using comm::ReduceOp;
using comm::World;
using test::Expectations;
using test::fork_ranks;
using test::gradient_of;
using test::same;
using Codes = std::vector<int>;

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    if (const int gpus = test::count_gpus(); gpus < 2) GTEST_SKIP() << gpus << " GPUs, two are needed";
  }
};

std::shared_ptr<World> join(int64_t rank, int64_t port, double timeout_s) {
  return test::join_gpus(rank, 2, port, timeout_s);
}

void check_movers(Group& group, Expectations& expect, at::ScalarType type) {
  const auto options = at::TensorOptions(group.device());
  const int64_t me = group.rank();
  const auto counting = [&](int64_t first, int64_t count) {
    return at::arange(first, first + count, at::TensorOptions(at::kLong)).to(type).to(group.device());
  };
  at::Tensor full = at::zeros({10}, options).to(type), pieces = full.clone();
  group.all_gather(full, counting(5 * me, 5));
  expect.is_true(same(full, counting(0, 10)), "all_gather");
  // rank 0 holds 0..9, rank 1 holds 10..19; rank r gets the r-th halves.
  group.all_to_all(pieces, counting(10 * me, 10));
  expect.is_true(same(pieces, at::cat({counting(5 * me, 5), counting(10 + 5 * me, 5)})), "all_to_all");
  at::Tensor told = counting(me, 4);
  group.broadcast(told, 1);
  expect.is_true(same(told, counting(1, 4)), "broadcast");
  for (int64_t root = 0; root < 2; ++root) {
    for (const bool in_place : {false, true}) {
      at::Tensor slots = at::zeros({10}, options).to(type), mine = slots.narrow(0, 5 * me, 5);
      mine.copy_(counting(5 * me, 5));
      group.gather(slots, in_place ? mine : mine.clone(), root);
      if (me == root) expect.is_true(same(slots, counting(0, 10)), "gather");
      at::Tensor chunk = in_place ? mine : at::zeros({5}, options).to(type);
      if (me == root) slots.copy_(counting(root, 10));
      group.scatter(chunk, slots, root);
      expect.is_true(same(chunk, counting(root + 5 * me, 5)), "scatter");
    }
  }
  at::Tensor received = at::zeros({6}, options).to(type);
  if (me == 0) group.send(counting(7, 6), 1);
  if (me == 1) group.recv(received, 0);
  if (me == 1) expect.is_true(same(received, counting(7, 6)), "send and recv");
  for (int64_t round = 0; round < 3; ++round) {
    group.send_recv(counting(9 * me + round, 6), 1 - me, received, 1 - me);
    expect.is_true(same(received, counting(9 * (1 - me) + round, 6)), "send_recv");
  }
}

TEST_F(Nccl, CollectivesFollowTheirFormulas) {
  const int64_t port = test::free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, port, 60.0);
    const auto group = world->make_group("all", {0, 1});
    Expectations expect;
    for (const auto type : {at::kFloat, at::kBFloat16, at::kLong, at::kByte})
      check_movers(*group, expect, type);
    at::Tensor sum = at::full({9}, 1.0f + static_cast<float>(rank), group->device());
    group->all_reduce(sum, ReduceOp::kSum);
    expect.is_true(same(sum, at::full({9}, 3.0f)), "all_reduce");
    for (int64_t root = 0; root < 2; ++root) {
      for (const auto type : {at::kFloat, at::kHalf, at::kBFloat16, at::kLong}) {
        at::Tensor added = at::arange(rank, rank + 9, at::kLong).to(type).to(group->device());
        at::Tensor most = added.clone();
        if (most.is_floating_point() && rank == 1) most[2] = std::nan("");
        group->reduce(added, ReduceOp::kSum, root);
        group->reduce(most, ReduceOp::kMax, root);
        if (rank != root) continue;
        expect.is_true(same(added, (at::arange(9, at::kLong) * 2 + 1).to(type)), "reduce");
        at::Tensor wanted = at::arange(1, 10, at::kLong).to(type);
        if (most.is_floating_point()) {
          expect.is_true(most[2].isnan().item<bool>(), "a NaN stays one");
          most[2] = wanted[2].item<double>();
        }
        expect.is_true(same(most, wanted), "maximum");
      }
    }
    expect.is_true(group->traffic().at(plan::Collective::kReduce).calls == 16, "calls of reduce");
    at::Tensor empty = at::empty({0}, at::TensorOptions(group->device()));
    group->reduce(empty, ReduceOp::kSum, 1);
    group->gather(empty, empty, 1);
    group->scatter(empty, empty, 1);
    at::Tensor shard = at::zeros({2}, group->device());
    group->reduce_scatter(shard, at::arange(4, at::kFloat).to(group->device()));
    expect.is_true(same(shard, at::arange(4, at::kFloat).narrow(0, 2 * rank, 2) * 2), "reduce_scatter");
    group->barrier();
    const auto rows = gather_scalars(*group, {1.0 / (3.0 + static_cast<double>(rank))});
    expect.is_true(rows == std::vector<std::vector<double>>{{1.0 / 3.0}, {1.0 / 4.0}}, "gather_scalars");
    expect.is_true(group->traffic().at(plan::Collective::kReduceScatter).bytes == 8, "traffic");
    return expect.code();
  };
  EXPECT_EQ(fork_ranks(2, body, 90.0), (Codes{0, 0}));
}

TEST_F(Nccl, OrderedReductionHasTheBitsOfTheCpu) {
  const int64_t port = test::free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, port, 60.0);
    const auto group = world->make_group("all", {0, 1});
    Expectations expect;
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      for (const int64_t m : {1, 7, 4096, 100'003}) {
        at::Tensor output = at::empty({m}, group->device());
        group->reduce_scatter_ordered(output, gradient_of(rank, 2 * m).to(wire).to(group->device()));
        const at::Tensor wanted =
            gradient_of(0, 2 * m).to(wire).to(at::kFloat) + gradient_of(1, 2 * m).to(wire).to(at::kFloat);
        expect.is_true(same(output, wanted.narrow(0, m * rank, m)), fmt::format("{} elements", m));
      }
    }
    return expect.code();
  };
  EXPECT_EQ(fork_ranks(2, body, 90.0), (Codes{0, 0}));
}

TEST_F(Nccl, TreeSumKernelHasTheBitsOfTheCpuForAnyNumberOfRanks) {
  const auto body = [](int64_t) {
    kernels::set_gpu(0);
    Expectations expect;
    for (int64_t ranks = 1; ranks <= 17; ++ranks) {
      for (const int64_t count : {0, 1, 5, 1024, 30'001}) {
        const at::Tensor rows = gradient_of(ranks, ranks * count);
        std::vector<const float*> pointers;
        for (int64_t r = 0; r < ranks; ++r) pointers.push_back(rows.const_data_ptr<float>() + r * count);
        at::Tensor wanted = at::empty({count});
        kernels::tree_sum(wanted.mutable_data_ptr<float>(), pointers, count);
        const at::Tensor there = rows.to(c10::Device(c10::kCUDA, 0));
        at::Tensor got = at::empty({count}, there.options());
        const int error = kernels::tree_sum_cuda(got.mutable_data_ptr<float>(), there.const_data_ptr<float>(),
                                                 ranks, count, nullptr);
        expect.is_true(error == 0 && same(got, wanted), fmt::format("{} ranks of {}", ranks, count));
      }
    }
    return expect.code();
  };
  EXPECT_EQ(fork_ranks(1, body, 60.0), (Codes{0}));
}

TEST_F(Nccl, ARankThatNeverEntersIsNamedAndTheProcessLives) {
  const int64_t port = test::free_port();
  const test::Gate seen;
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, port, 4.0);
    const auto group = world->make_group("dp", {0, 1});
    at::Tensor tensor = at::ones({4}, group->device());
    group->all_reduce(tensor, ReduceOp::kSum);
    kernels::synchronize_gpu();
    if (rank == 1) return seen.wait(20.0) ? 0 : 2;
    const double started = monotonic_seconds();
    try {
      group->all_reduce(tensor, ReduceOp::kSum);
      kernels::synchronize_gpu();
      group->check();
    } catch (const CommError& error) {
      const std::string text = error.what();
      const double waited = monotonic_seconds() - started;
      seen.open();
      fmt::print(stderr, "after {:.1f} s: {}\n", waited, text);
      const bool named = text.find("all_reduce #2 of group dp") != std::string::npos &&
                         text.find("rank 1 was last seen before all_reduce #2") != std::string::npos;
      return named && waited > 3.8 && waited < 9.0 ? 0 : 2;
    }
    return 1;
  };
  EXPECT_EQ(fork_ranks(2, body, 60.0), (Codes{0, 0}));
}

/// With and without peer memory: the wait is in a kernel of ours, or of NCCL.
TEST_F(Nccl, AKilledRankEndsTheOthersLongBeforeTheDeadline) {
  for (const bool share : {true, false}) {
    const int64_t port = test::free_port();
    const auto body = [&](int64_t rank) {
      const auto world = test::join_gpus(rank, 2, port, 60.0, {.share = share});
      const auto group = world->make_group("dp", {0, 1});
      const at::Tensor part = group->symmetric_empty(1 << 20, at::kFloat).fill_(1.0);
      at::Tensor whole = at::empty({2 << 20}, group->device());
      group->all_gather(whole, part);
      kernels::synchronize_gpu();
      if (rank == 1) ::raise(SIGKILL);
      const double started = monotonic_seconds();
      try {
        group->all_gather(whole, part);
        kernels::synchronize_gpu();
        group->check();
      } catch (const CommError& error) {
        const double waited = monotonic_seconds() - started;
        fmt::print(stderr, "after {:.1f} s: {}\n", waited, error.what());
        const bool named =
            std::string(error.what()).find("lost a peer: rank 1 (process") != std::string::npos;
        return named && waited < 4.5 ? 0 : 2;  // the launcher kills after 5 s
      }
      return 1;
    };
    EXPECT_EQ(fork_ranks(2, body, 40.0), (Codes{0, -SIGKILL})) << (share ? "peer memory" : "NCCL");
  }
}

}  // namespace
}  // namespace trireme
