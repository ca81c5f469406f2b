// Links between GPUs: what arrives is what the sender's stream had written.
// One process a GPU; skipped with fewer than two GPUs.
#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>
#include <vector>

#include "tests/comm/gpu_ranks.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/comm/link.h"
#include "trireme/comm/shared_word.h"

namespace trireme {
namespace {

using comm::Link;
using comm::make_link;
using comm::World;
using test::Expectations;
using test::fork_ranks;
using test::same;
using Codes = std::vector<int>;

constexpr int64_t kMiB = 1 << 20;

/// Through peer memory where there is some, and over NCCL.
class GpuLinks : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const int gpus = test::count_gpus(); gpus < 2) GTEST_SKIP() << gpus << " GPUs, two are needed";
  }
  std::shared_ptr<World> join(int64_t rank, double timeout_s = 60.0) const {
    // NCCL's kernels wait for the other GPU, which may wait for a kernel that is still to be loaded.
    if (!GetParam()) ::setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    return test::join_gpus(rank, 2, port_, timeout_s, {.share = GetParam()});
  }

  /// Over NCCL the first message connects the ranks.
  std::string nth(const char* operation, int64_t number) const {
    return fmt::format("{} #{}", operation, GetParam() ? number : number + 1);
  }

  int64_t port_ = test::free_port();
};
INSTANTIATE_TEST_SUITE_P(Comm, GpuLinks, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "PeerMemory" : "Nccl"; });

/// Both directions between two ranks, from this rank's side.
struct Ends {
  explicit Ends(World& world) {
    const auto there = make_link(world, 0, 1), back = make_link(world, 1, 0);
    out = world.rank() == 0 ? there : back;
    in = world.rank() == 0 ? back : there;
  }
  std::shared_ptr<Link> out, in;
};

at::Tensor pattern(int64_t seed, int64_t count, at::ScalarType dtype) {
  return (at::arange(count, at::kLong) * 2654435761 + seed * 40503).remainder(30011).to(dtype);
}

/// Occupies the current stream for some milliseconds.
void keep_busy(c10::Device device) {
  at::Tensor load = at::ones({4096, 4096}, device);
  for (int i = 0; i < 8; ++i) load = at::mm(load, load).clamp_(-1, 1);
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

int large_tensors_pass_each_other_and_their_memory_comes_back(World& world) {
  const int64_t rank = world.rank();
  constexpr int64_t kTensors = 4, kCount = 64 * kMiB / 2;
  const c10::Device device = world.device();
  const Ends ends(world);
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  std::vector<at::Tensor> into;
  for (int64_t i = 0; i < kTensors; ++i) into.push_back(at::empty({kCount}, options));
  for (const at::Tensor& tensor : into) ends.in->post(tensor);
  for (int64_t i = 0; i < kTensors; ++i) ends.out->send(at::full({kCount}, i + 4 * rank, options));
  at::Tensor wrong = at::zeros({}, options.dtype(at::kLong));
  for (int64_t i = 0; i < kTensors; ++i) wrong += (ends.in->wait() != i + 4 * (1 - rank)).sum();
  ends.out->flush();
  Expectations expect;
  expect.is_true(wrong.item<int64_t>() == 0, "every element");
  expect.is_true(ends.out->sent_bytes() == kTensors * 64 * kMiB, "bytes are counted");
  into.clear();
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const int64_t held = stats.allocated_bytes[0].current;
  expect.is_true(held < 64 * kMiB, fmt::format("{} bytes are still held", held));
  return expect.code();
}

int carry_every_dtype_and_shape_in_both_directions_at_once(World& world) {
  const int64_t rank = world.rank();
  const c10::Device device = world.device();
  const Ends ends(world);
  Expectations expect;
  const auto tensors_of = [](int64_t of) {
    return std::vector<at::Tensor>{pattern(of, 12, at::kFloat).view({3, 4}),
                                   pattern(of + 1, 7, at::kBFloat16),
                                   pattern(of + 2, 1, at::kLong),
                                   at::zeros({0}),
                                   pattern(of + 3, 100'001, at::kByte),
                                   pattern(of + 4, 4 * kMiB, at::kBFloat16)};
  };
  const std::vector<at::Tensor> sent = tensors_of(10 * rank), wanted = tensors_of(10 * (1 - rank));
  int64_t bytes = 0;
  for (size_t i = 0; i < sent.size(); ++i) {
    const at::Tensor into = at::empty_like(wanted[i], device);
    ends.in->post(into);
    ends.out->send(sent[i].to(device));
    bytes += static_cast<int64_t>(sent[i].nbytes());
    const at::Tensor got = ends.in->wait();
    expect.is_true(got.is_same(into), "the posted tensor comes back");
    expect.is_true(same(got, wanted[i]), fmt::format("tensor {}", i));
  }
  ends.out->flush();
  expect.is_true(ends.out->sent_bytes() == bytes, "bytes are counted");
  expect.is_true(ends.in->sent_bytes() == 0, "a receiver sends nothing");
  return expect.code();
}

/// The sender frees what it has sent and overwrites memory of that size at once; the receiver posts buffers
/// that its stream still reads.
int streams_alone_keep_writers_and_readers_apart(World& world) {
  const int64_t rank = world.rank();
  constexpr int64_t kRounds = 200, kCount = 2 * kMiB;
  const c10::Device device = world.device();
  const Ends ends(world);
  const auto options = at::TensorOptions(device).dtype(at::kInt);
  std::vector<at::Tensor> slots = {at::zeros({kCount}, options), at::zeros({kCount}, options)};
  at::Tensor wrong = at::zeros({}, options.dtype(at::kLong));
  for (int64_t round = 0; round < kRounds; ++round) {
    if (round % 20 == 0) keep_busy(device);
    ends.in->post(slots[static_cast<size_t>(round % 2)]);
    {
      const at::Tensor out = at::full({kCount}, 2 * round + rank, options);
      ends.out->send(out);
    }
    at::full({kCount}, -1, options);  // takes the memory of `out` if it is free
    const at::Tensor got = ends.in->wait();
    if (round % 31 == 0) keep_busy(device);
    wrong += (got != 2 * round + (1 - rank)).sum();
  }
  ends.out->flush();
  const auto count = wrong.item<int64_t>();
  if (count != 0) fmt::print(stderr, "{} wrong values\n", count);
  return count == 0 ? 0 : 1;
}

int many_tensors_are_sent_before_one_is_asked_for(World& world) {
  const int64_t rank = world.rank();
  constexpr int64_t kTensors = 200;
  const c10::Device device = world.device();
  const Ends ends(world);
  const auto options = at::TensorOptions(device).dtype(at::kLong);
  for (int64_t i = 0; i < kTensors; ++i) ends.out->send(at::full({1 + i % 57}, i + 1000 * rank, options));
  std::vector<at::Tensor> got;
  for (int64_t i = 0; i < kTensors; ++i) ends.in->post(at::empty({1 + i % 57}, options));
  for (int64_t i = 0; i < kTensors; ++i) got.push_back(ends.in->wait());
  ends.out->flush();
  Expectations expect;
  for (int64_t i = 0; i < kTensors; ++i) {
    const at::Tensor wanted = at::full({1 + i % 57}, i + 1000 * (1 - rank), at::kLong);
    expect.is_true(same(got[static_cast<size_t>(i)], wanted), fmt::format("tensor {}", i));
  }
  return expect.code();
}

/// A stream of torch's pool may be held up by what other processes do, also by the receiver. NCCL's kernels
/// are on such a stream, but of the other priority.
int wait_for_no_stream_of_the_pool(World& world) {
  const int64_t rank = world.rank();
  constexpr uint32_t kStreamsOfPool = 32;
  const c10::Device device = world.device();
  const Ends ends(world);
  const auto held = comm::SharedWord::make();
  Expectations expect;
  for (uint32_t i = 1; i <= kStreamsOfPool; ++i) {
    held->wait_for(i, c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index()).stream());
    const at::Tensor into = at::empty({12}, device);
    ends.in->post(into);
    ends.out->send(pattern(rank + i, 12, at::kFloat).to(device));
    expect.is_true(same(ends.in->wait(), pattern(1 - rank + i, 12, at::kFloat)), fmt::format("tensor {}", i));
    held->write_from_host(i);
  }
  kernels::synchronize_gpu();
  return expect.code();
}

int refuse_tensors_that_cannot_travel(World& world) {
  const Ends ends(world);
  Expectations expect;
  const auto refused = [&](const auto& call, const std::string& words) {
    try {
      call();
    } catch (const LogicError& error) {
      expect.is_true(has(error.what(), words), error.what());
      return;
    }
    expect.is_true(false, words);
  };
  const at::Tensor turned = at::ones({2, 3}, world.device()).t();
  refused([&] { ends.out->send(turned); }, "not contiguous");
  refused([&] { ends.in->post(turned); }, "not contiguous");
  refused([&] { ends.out->send(at::ones({2})); }, "is on cpu");
  refused([&] { ends.in->wait(); }, "post() first");
  refused([&] { ends.in->send(at::ones({2}, world.device())); }, "is the receiver");
  refused([&] { ends.out->wait(); }, "is the sender");
  return expect.code();
}

struct Law {
  const char* name;
  int (*check)(World&);  ///< 0 when it holds
};
/// The first one counts what the process holds.
constexpr Law kLaws[] = {
    {"large tensors pass each other and their memory comes back",
     large_tensors_pass_each_other_and_their_memory_comes_back},
    {"carry every dtype and shape in both directions at once",
     carry_every_dtype_and_shape_in_both_directions_at_once},
    {"streams alone keep writers and readers apart", streams_alone_keep_writers_and_readers_apart},
    {"many tensors are sent before one is asked for", many_tensors_are_sent_before_one_is_asked_for},
    {"wait for no stream of the pool", wait_for_no_stream_of_the_pool},
    {"refuse tensors that cannot travel", refuse_tensors_that_cannot_travel},
};

/// In one launch: over NCCL it takes a process seconds to load all kernels.
TEST_P(GpuLinks, KeepTheirLaws) {
  const auto body = [&](int64_t rank) {
    const auto world = join(rank);
    Expectations expect;
    for (const Law& law : kLaws) {
      if (rank == 0) fmt::print(stderr, "{}\n", law.name);
      expect.is_true(law.check(*world) == 0, law.name);
    }
    return expect.code();
  };
  EXPECT_EQ(fork_ranks(2, body, 120.0), (Codes{0, 0}));
}

/// What the CommError says that comes from waiting for a tensor, within `limit_s`; empty when none comes.
std::string error_of_waiting(Link& link, c10::Device device, double limit_s) {
  const double started = monotonic_seconds();
  try {
    link.post(at::empty({4}, device));
    link.wait();
    kernels::synchronize_gpu();
    link.flush();
  } catch (const CommError& error) {
    const double waited = monotonic_seconds() - started;
    fmt::print(stderr, "after {:.1f} s: {}\n", waited, error.what());
    return waited < limit_s ? error.what() : "";
  }
  return {};
}

/// The receiver joins a collective behind the tensor, for which the sender's GPU waits. A copy that the
/// sender enqueues while its GPU waits so may not leave before the wait ends.
TEST_P(GpuLinks, WhatIsSettledArrivesThoughTheSendersGpuWaitsForTheReceiver) {
  const auto body = [&](int64_t rank) {
    constexpr int64_t kCount = 16 * kMiB;
    const auto world = join(rank);
    const auto group = world->make_group("all", {0, 1});
    const c10::Device device = world->device();
    const Ends ends(*world);
    Expectations expect;
    at::Tensor sum = at::ones({1}, device);
    group->all_reduce(sum, comm::ReduceOp::kSum);  // connects the ranks
    for (int64_t round = 0; round < 4; ++round) {
      const at::Tensor sent = pattern(round, kCount, at::kFloat);
      if (rank == 0) {
        ends.out->send(sent.to(device));
        ends.out->settle();
        group->all_reduce(sum, comm::ReduceOp::kSum);
        kernels::synchronize_gpu();
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const at::Tensor into =
            at::empty({kCount * (round + 1)}, at::TensorOptions(device)).narrow(0, 0, kCount);
        ends.in->post(into);
        expect.is_true(same(ends.in->wait(), sent), fmt::format("round {}", round));
        group->all_reduce(sum, comm::ReduceOp::kSum);
      }
    }
    expect.is_true(sum.item<float>() == 32.0F, "the collectives have run");
    return expect.code();
  };
  EXPECT_EQ(fork_ranks(2, body, 90.0), (Codes{0, 0}));
}

/// The sender, who is told where it lies, may copy to it at any time.
TEST(GpuCopyLinks, MemoryThatWasPostedInVainIsNotUsedAgain) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  const int64_t port = test::free_port();
  const auto body = [&](int64_t rank) {
    const auto world = test::join_gpus(rank, 2, port, /*timeout_s=*/20.0);
    auto link = make_link(*world, 1, 0);
    if (rank == 1) return 0;
    const auto allocate = [&] { return at::empty({12 * kMiB}, at::TensorOptions(world->device())); };
    at::Tensor posted = allocate();
    const void* const memory = posted.const_data_ptr();
    link->post(posted);
    posted = at::Tensor();
    link.reset();
    return allocate().const_data_ptr() == memory ? 1 : 0;
  };
  EXPECT_EQ(fork_ranks(2, body, 60.0), (Codes{0, 0}));
}

TEST_P(GpuLinks, ATensorThatNeverComesIsNamedAndTheProcessLives) {
  const test::Gate seen;
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, 4.0);
    const Ends ends(*world);
    if (rank == 1) return seen.wait(20.0) ? 0 : 2;
    const std::string error = error_of_waiting(*ends.in, world->device(), 9.0);
    seen.open();
    return has(error, nth("recv", 1) + " for 16 bytes of Float (4) of group 1->0") &&
                   has(error, "deadline 4 s")
               ? 0
               : 1;
  };
  EXPECT_EQ(fork_ranks(2, body, 60.0), (Codes{0, 0}));
}

TEST_P(GpuLinks, AKilledSenderEndsTheWaitLongBeforeTheDeadline) {
  const auto body = [&](int64_t rank) {
    const auto world = join(rank);
    const Ends ends(*world);
    if (rank == 1) {
      ends.out->send(at::ones({4}, world->device()));
      ends.out->flush();
      ::raise(SIGKILL);
    }
    ends.in->post(at::empty({4}, world->device()));
    if (!same(ends.in->wait(), at::ones({4}))) return 2;
    const std::string error = error_of_waiting(*ends.in, world->device(), 4.5);
    return has(error, nth("recv", 2)) && has(error, "rank 1 (process") ? 0 : 1;
  };
  EXPECT_EQ(fork_ranks(2, body, 40.0), (Codes{0, -SIGKILL}));
}

TEST_P(GpuLinks, AKilledReceiverEndsTheSendersFlush) {
  // NCCL takes in what its buffers on the receiver hold, 4 MiB in each of up to 32 channels.
  const int64_t bytes = GetParam() ? 64 * kMiB : 1024 * kMiB;
  const auto body = [&](int64_t rank) {
    const auto world = join(rank);
    const Ends ends(*world);
    if (rank == 0) ::raise(SIGKILL);
    const double started = monotonic_seconds();
    try {
      ends.out->send(at::ones({bytes}, at::TensorOptions(world->device()).dtype(at::kByte)));
      ends.out->flush();
    } catch (const CommError& error) {
      const double waited = monotonic_seconds() - started;
      fmt::print(stderr, "after {:.1f} s: {}\n", waited, error.what());
      return has(error.what(), fmt::format("{} for {} bytes", nth("send", 1), bytes)) && waited < 6.0 ? 0 : 2;
    }
    return 1;
  };
  EXPECT_EQ(fork_ranks(2, body, 40.0), (Codes{-SIGKILL, 0}));
}

TEST_P(GpuLinks, TheSenderIsToldBothSizes) {
  if (!GetParam()) GTEST_SKIP() << "NCCL compares no sizes";
  const auto body = [&](int64_t rank) {
    const auto world = join(rank);
    const auto link = make_link(*world, 1, 0);
    const auto options = at::TensorOptions(world->device()).dtype(at::kInt);
    try {
      if (rank == 1) link->send(at::ones({6}, options));
      if (rank == 0) link->post(at::ones({5}, options));
      if (rank == 0) link->wait();
      kernels::synchronize_gpu();
      link->flush();
    } catch (const LogicError& error) {
      fmt::print(stderr, "{}\n", error.what());
      return rank == 1 && has(error.what(), "send #1 for 24 bytes of Int (6) of group 1->0") &&
                     has(error.what(), "rank 0 expects 20 bytes of Int as #1")
                 ? 0
                 : 2;
    } catch (const CommError& error) {
      fmt::print(stderr, "{}\n", error.what());
      return rank == 0 && has(error.what(), "rank 1 failed in send #1 for 24 bytes of Int (6)") ? 0 : 3;
    }
    return 1;
  };
  EXPECT_EQ(fork_ranks(2, body, 40.0), (Codes{0, 0}));
}

}  // namespace
}  // namespace trireme
