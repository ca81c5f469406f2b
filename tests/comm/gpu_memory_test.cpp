// GPUs that read each other's memory: the same bits as over NCCL, under repeated and overlapped use, and what
// happens when ranks do different things. One process a GPU; skipped with fewer than two GPUs.
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <deque>
#include <vector>

#include "tests/comm/gpu_ranks.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::GatherBy;
using comm::Group;
using test::Expectations;
using test::fork_ranks;
using test::gradient_of;
using test::same;

std::vector<int64_t> all_of(int64_t size) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

class GpuMemory : public testing::Test {
 protected:
  void SetUp() override {
    ranks_ = std::min(test::count_gpus(), 8);
    if (ranks_ < 2) GTEST_SKIP() << ranks_ << " GPUs, two are needed";
  }

  /// `body` on one process a GPU, with a group of all: once with each of `peers`.
  void on_all(const std::function<int(Group&)>& body,
              const std::vector<comm::PeerOptions>& peers = {comm::PeerOptions{}}) {
    std::vector<int64_t> ports;
    for (size_t i = 0; i < peers.size(); ++i) ports.push_back(test::free_port());
    const auto run = [&](int64_t rank) {
      Expectations expect;
      for (size_t i = 0; i < peers.size(); ++i) {
        const auto world = test::join_gpus(rank, ranks_, ports[i], /*timeout_s=*/60.0, peers[i]);
        const auto group = world->make_group("all", all_of(ranks_));
        expect.is_true(body(*group) == 0, fmt::format("world {}", i));
        group->barrier();
      }
      return expect.code();
    };
    EXPECT_EQ(fork_ranks(ranks_, run, 240.0), std::vector<int>(static_cast<size_t>(ranks_), 0));
  }

  int64_t ranks_ = 0;
};

/// With the GPUs to themselves: each round waits for the other GPU, whose turn another process may have.
using GpuMemoryAlone = GpuMemory;

const std::vector<comm::PeerOptions> kBothGathers = {{.share = true, .gather = GatherBy::kKernels},
                                                     {.share = true, .gather = GatherBy::kCopies}};

at::Tensor symmetric_copy(Group& group, const at::Tensor& values) {
  at::Tensor memory = group.symmetric_empty(values.numel(), values.scalar_type());
  memory.copy_(values);
  return memory;
}

TEST_F(GpuMemory, SumsHaveTheBitsOfTheOrderedReductionOverNccl) {
  on_all([](Group& group) {
    Expectations expect;
    for (const auto wire : {at::kFloat, at::kBFloat16}) {
      for (const int64_t m : {1, 7, 8, 4096, 100'003, 3'000'000}) {
        const at::Tensor input = gradient_of(group.rank(), group.size() * m).to(wire).to(group.device());
        at::Tensor over_nccl = at::empty({m}, at::TensorOptions(group.device())),
                   in_place = over_nccl.clone();
        group.reduce_scatter_ordered(over_nccl, input);
        group.reduce_scatter_ordered(in_place, symmetric_copy(group, input));
        expect.is_true(same(in_place, over_nccl), fmt::format("{} elements of {}", m, c10::toString(wire)));
      }
    }
    expect.is_true(group.symmetric_bytes() > 0, "memory is shared");
    return expect.code();
  });
}

TEST_F(GpuMemory, TheSumMayBeWrittenToItsPlaceInTheInput) {
  on_all([](Group& group) {
    const int64_t m = 5000;
    const at::Tensor input = gradient_of(group.rank(), group.size() * m).to(group.device());
    at::Tensor wanted = at::empty({m}, input.options());
    group.reduce_scatter_ordered(wanted, input);
    const at::Tensor memory = symmetric_copy(group, input);
    at::Tensor place = memory.narrow(0, group.rank() * m, m);
    group.reduce_scatter_ordered(place, memory);
    return same(place, wanted) ? 0 : 1;
  });
}

TEST_F(GpuMemory, GathersByKernelsAndByCopiesMoveEveryByte) {
  const auto body = [](Group& group) {
    Expectations expect;
    for (const int64_t m : {1, 15, 16, 4099, 1 << 20}) {
      const auto bytes = [&](int64_t rank) {
        return (at::arange(m, at::kLong) * 7 + 31 * rank).remainder(251).to(at::kByte);
      };
      std::vector<at::Tensor> rows;
      for (int64_t rank = 0; rank < group.size(); ++rank) rows.push_back(bytes(rank));
      const at::Tensor wanted = at::cat(rows);
      const at::Tensor mine = symmetric_copy(group, bytes(group.rank()).to(group.device()));
      at::Tensor output = at::zeros({group.size() * m}, mine.options());
      group.all_gather(output, mine);
      expect.is_true(same(output, wanted), fmt::format("{} bytes", m));
      // In place: the input is this rank's part of the output.
      at::Tensor whole = group.symmetric_empty(group.size() * m, at::kByte).zero_();
      at::Tensor part = whole.narrow(0, group.rank() * m, m);
      part.copy_(bytes(group.rank()));
      group.all_gather(whole, part);
      expect.is_true(same(whole, wanted), fmt::format("{} bytes in place", m));
    }
    return expect.code();
  };
  on_all(body, kBothGathers);
}

/// Both channels at once on streams of their own, over memory that changes every round, beside computation.
TEST_F(GpuMemoryAlone, TenThousandOverlappedRoundsAreExact) {
  const auto body = [](Group& group) {
    constexpr int64_t kRounds = 10'000, kCount = 20'000;
    const int64_t n = group.size(), me = group.rank();
    const auto device = group.device();
    const c10::cuda::CUDAStream gathers = c10::cuda::getStreamFromPool(true, device.index());
    const c10::cuda::CUDAStream reduces = c10::cuda::getStreamFromPool(true, device.index());
    at::Tensor shard = group.symmetric_empty(kCount, at::kFloat);
    at::Tensor grads = group.symmetric_empty(n * kCount, at::kBFloat16);
    at::Tensor whole = at::empty({n * kCount}, shard.options()), sum = at::empty({kCount}, shard.options());
    at::Tensor wrong_gather = at::zeros({}, shard.options().dtype(at::kLong));
    at::Tensor wrong_sum = wrong_gather.clone();
    at::Tensor load = at::randn({512, 512}, shard.options());
    const at::Tensor expected_ranks = at::arange(n, shard.options()).repeat_interleave(kCount);
    c10::cuda::getCurrentCUDAStream().synchronize();
    for (int64_t round = 0; round < kRounds; ++round) {
      const auto value = static_cast<double>(round % 64);
      {
        const c10::StreamGuard guard(gathers);
        shard.fill_(value * 16.0 + static_cast<double>(me));
        group.all_gather(whole, shard);
        wrong_gather += (whole != expected_ranks + value * 16.0).sum();
      }
      {
        const c10::StreamGuard guard(reduces);
        grads.fill_(value + static_cast<double>(me));
        group.reduce_scatter_ordered(sum, grads);
        const double total = static_cast<double>(n) * value + static_cast<double>(n * (n - 1)) / 2.0;
        wrong_sum += (sum != total).sum();
      }
      if (round % 16 == 0) load = at::mm(load, load).clamp(-1, 1);
      if (round % 1000 == 999) kernels::synchronize_gpu();
    }
    kernels::synchronize_gpu();
    group.check();
    const int64_t count = wrong_gather.item<int64_t>() + wrong_sum.item<int64_t>();
    if (count != 0) fmt::print(stderr, "{} wrong values\n", count);
    return count == 0 ? 0 : 1;
  };
  on_all(body, kBothGathers);
}

/// Messages of models' sizes, mostly 32 MiB, every twentieth 128, every hundredth 512, in one memory that
/// they share.
TEST_F(GpuMemoryAlone, TenThousandRoundsOfLargeMessagesAreExact) {
  const auto body = [](Group& group) {
    constexpr int64_t kRounds = 10'000, kMiB = 1 << 20, kLargest = 512 * kMiB;
    const int64_t n = group.size(), me = group.rank();
    at::Tensor shards = group.symmetric_empty(kLargest / 4 / n, at::kFloat);
    at::Tensor all_grads = group.symmetric_empty(kLargest / 2, at::kBFloat16);
    at::Tensor gathered = at::empty({kLargest / 4}, shards.options());
    at::Tensor sums = at::empty({kLargest / 2 / n}, shards.options());
    at::Tensor wrong = at::zeros({}, shards.options().dtype(at::kLong));
    const at::Tensor rank_column = at::arange(n, shards.options()).unsqueeze(1);
    for (int64_t round = 0; round < kRounds; ++round) {
      const int64_t bytes = (round % 100 == 0 ? 512 : round % 20 == 0 ? 128 : 32) * kMiB;
      const auto value = static_cast<double>(round % 64);
      at::Tensor shard = shards.narrow(0, 0, bytes / 4 / n), whole = gathered.narrow(0, 0, bytes / 4 / n * n);
      shard.fill_(value * 16.0 + static_cast<double>(me));
      group.all_gather(whole, shard);
      wrong += (whole.view({n, -1}) != rank_column + value * 16.0).sum();
      at::Tensor sum = sums.narrow(0, 0, bytes / 2 / n), grads = all_grads.narrow(0, 0, bytes / 2 / n * n);
      grads.fill_(value + static_cast<double>(me));
      group.reduce_scatter_ordered(sum, grads);
      wrong += (sum != static_cast<double>(n) * value + static_cast<double>(n * (n - 1)) / 2.0).sum();
      if (round % 1000 == 999) kernels::synchronize_gpu();
    }
    group.check();
    const auto count = wrong.item<int64_t>();
    if (count != 0) fmt::print(stderr, "{} wrong values\n", count);
    return count == 0 ? 0 : 1;
  };
  on_all(body);
}

TEST_F(GpuMemory, RanksInDifferentOperationsAreToldWhich) {
  const int64_t port = test::free_port();
  const auto run = [&](int64_t rank) {
    const auto world = test::join_gpus(rank, ranks_, port, 20.0);
    const auto group = world->make_group("dp", all_of(ranks_));
    const int64_t count = rank == 0 ? 1 << 18 : 64;  // kernels of different numbers of blocks
    const at::Tensor memory = group->symmetric_empty(group->size() << 18, at::kFloat).zero_();
    const at::Tensor grads = memory.narrow(0, 0, group->size() * count);
    at::Tensor sum = at::empty({count}, grads.options());
    const comm::Subject subject(*group, rank == 0 ? "layers.3" : "layers.4");
    const double started = monotonic_seconds();
    try {
      group->reduce_scatter_ordered(sum, grads);
      kernels::synchronize_gpu();
      group->check();
    } catch (const CommError& error) {
      const std::string text = error.what();
      fmt::print(stderr, "{}\n", text);
      const bool named = text.find(rank == 0 ? "for layers.3" : "for layers.4") != std::string::npos &&
                         text.find("a different operation on group rank") != std::string::npos;
      return named && monotonic_seconds() - started < 10.0 ? 0 : 2;
    }
    return 1;
  };
  EXPECT_EQ(fork_ranks(ranks_, run, 90.0), std::vector<int>(static_cast<size_t>(ranks_), 0));
}

TEST_F(GpuMemory, ARankThatNeverComesFreesTheGpuAtTheDeadline) {
  const int64_t port = test::free_port();
  const std::deque<test::Gate> seen(static_cast<size_t>(ranks_));
  const auto run = [&](int64_t rank) {
    const auto world = test::join_gpus(rank, ranks_, port, 4.0);
    const auto group = world->make_group("dp", all_of(ranks_));
    const at::Tensor mine = group->symmetric_empty(64, at::kFloat).zero_();
    at::Tensor whole = at::empty({group->size() * 64}, mine.options());
    group->all_gather(whole, mine);
    kernels::synchronize_gpu();
    if (rank == 1) {
      for (int64_t other = 0; other < ranks_; ++other)
        if (other != 1 && !seen[static_cast<size_t>(other)].wait(20.0)) return 3;
      return 0;
    }
    const double started = monotonic_seconds();
    try {
      group->all_gather(whole, mine);
      kernels::synchronize_gpu();
      group->check();
    } catch (const CommError& error) {
      const double waited = monotonic_seconds() - started;
      seen[static_cast<size_t>(rank)].open();
      fmt::print(stderr, "after {:.1f} s: {}\n", waited, error.what());
      const bool named = std::string(error.what()).find("all_gather #2 of group dp") != std::string::npos;
      return named && waited > 3.8 && waited < 9.0 ? 0 : 2;
    }
    return 1;
  };
  EXPECT_EQ(fork_ranks(ranks_, run, 90.0), std::vector<int>(static_cast<size_t>(ranks_), 0));
}

}  // namespace
}  // namespace trireme
