// Links between processes, and what an end says when the other dies or freezes.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "tests/comm/processes.h"
#include "trireme/base/clock.h"
#include "trireme/comm/link.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using comm::make_link;
using comm::World;
using test::expect_comm_error;
using test::fork_ranks;
using Codes = std::vector<int>;

constexpr int64_t kMebibyte = 1 << 20;

/// Through shared memory and over TCP.
class LinkProcesses : public ::testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<World> join(int64_t rank, double timeout_s) const {
    plan::WorldSpec spec;
    spec.rank = spec.local_rank = rank;
    spec.world_size = spec.local_world_size = 2;
    spec.master_port = port_;
    return World::join(spec, c10::kCPU, timeout_s, {.share = GetParam()});
  }

  int64_t port_ = test::free_port();
};
INSTANTIATE_TEST_SUITE_P(Comm, LinkProcesses, ::testing::Values(true, false),
                         [](const auto& tested) { return tested.param ? "Memory" : "Messages"; });

at::Tensor numbers(int64_t first, int64_t count) {
  return at::arange(first, first + count, at::kInt);
}

TEST_P(LinkProcesses, CarryBothDirectionsAtOnce) {
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, 20.0);
    const auto there = make_link(*world, 0, 1), back = make_link(*world, 1, 0);
    const auto& out = rank == 0 ? there : back;
    const auto& in = rank == 0 ? back : there;
    constexpr int64_t kTensors = 40, kCount = 3 * kMebibyte / 4;
    for (int64_t i = 0; i < kTensors; ++i) out->send(numbers(i + 100 * rank, kCount));
    for (int64_t i = 0; i < kTensors; ++i) {
      in->post(at::empty({kCount}, at::kInt));
      if (!at::equal(in->wait(), numbers(i + 100 * (1 - rank), kCount))) return 1;
    }
    out->flush();
    return out->sent_bytes() == kTensors * 3 * kMebibyte ? 0 : 2;
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

TEST_P(LinkProcesses, AKilledSenderEndsTheWaitLongBeforeTheDeadline) {
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, 60.0);
    const auto link = make_link(*world, 0, 1);
    if (rank == 0) {
      link->send(numbers(1, 4));
      link->flush();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      ::raise(SIGKILL);
    }
    link->post(at::empty({4}, at::kInt));
    link->post(at::empty({8}, at::kInt));
    if (!at::equal(link->wait(), numbers(1, 4))) return 10;
    return expect_comm_error(
        [&] { link->wait(); },
        {"[comm.recv] recv #2 for 32 bytes of Int (8) of group 0->1", "lost rank 0", "on rank 1"}, 6.0);
  };
  EXPECT_EQ(fork_ranks(2, body, 30.0), (Codes{-SIGKILL, 0}));
}

TEST_P(LinkProcesses, AKilledReceiverEndsTheSendersFlush) {
  const auto body = [&](int64_t rank) {
    const auto world = join(rank, 60.0);
    const auto link = make_link(*world, 0, 1);
    if (rank == 1) {
      link->post(at::empty({4}, at::kInt));
      link->wait();
      ::raise(SIGKILL);
    }
    link->send(numbers(1, 4));
    link->send(numbers(1, 8 * kMebibyte));
    return expect_comm_error([&] { link->flush(); },
                             {"[comm.send] send #2 for 33554432 bytes of Int (8388608) of group 0->1",
                              "lost rank 1", "rank 1 has not"},
                             6.0);
  };
  EXPECT_EQ(fork_ranks(2, body, 30.0), (Codes{0, -SIGKILL}));
}

TEST_P(LinkProcesses, AFrozenPeerHoldsNobodyPastTheDeadline) {
  const auto body = [&](int64_t rank) {
    constexpr double kDeadline_s = 1.0, kReport_s = 3.0;
    const auto world = join(rank, kDeadline_s);
    const auto there = make_link(*world, 0, 1), back = make_link(*world, 1, 0);
    if (rank == 1) {
      back->send(at::full({1}, ::getpid(), at::kLong));
      back->flush();
      ::raise(SIGSTOP);
      return 0;
    }
    back->post(at::empty({1}, at::kLong));
    const auto other = back->wait().item<int64_t>();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    back->post(at::empty({3}, at::kLong));
    const int received = expect_comm_error(
        [&] { back->wait(); },
        {"[comm.recv] recv #2 for 24 bytes of Long (3) of group 1->0", "gave up waiting for rank 1"},
        kDeadline_s + kReport_s);
    there->send(numbers(1, 8 * kMebibyte));
    const int sent = expect_comm_error(
        [&] { there->flush(); }, {"[comm.send] send #1 for 33554432 bytes", "gave up waiting for rank 1"},
        kDeadline_s + kReport_s);
    ::kill(static_cast<pid_t>(other), SIGKILL);
    return received + 10 * sent;
  };
  const double started = monotonic_seconds();
  EXPECT_EQ(fork_ranks(2, body, 30.0), (Codes{0, -SIGKILL}));
  EXPECT_LT(monotonic_seconds() - started, 14.0) << "leaving ends, too";
}

TEST(LinkProcesses, TwoHostsThatLoseEachOtherBothEnd) {
  const test::TwoHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "no network namespaces here: they take root and iproute2";
  const auto body = [&](int64_t rank) {
    constexpr double kDeadline_s = 2.0;
    hosts.enter(rank);
    plan::WorldSpec spec;
    spec.rank = rank;
    spec.world_size = 2;
    spec.local_world_size = 1;
    spec.master_port = 29500;
    spec.master_addr = test::TwoHosts::address(0);
    // These hosts share the kernel, and with it memory, which real ones do not.
    const auto world = World::join(spec, c10::kCPU, kDeadline_s, {.share = false});
    const auto link = make_link(*world, 0, 1);
    if (rank == 0) {
      link->send(numbers(1, 4));
      link->flush();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      hosts.part();
      link->send(numbers(1, 16 * kMebibyte));
      return expect_comm_error([&] { link->flush(); }, {"send #2", "gave up waiting for rank 1"},
                               kDeadline_s + 3.5);
    }
    link->post(at::empty({4}, at::kInt));
    link->wait();
    link->post(at::empty({16 * kMebibyte}, at::kInt));
    return expect_comm_error([&] { link->wait(); }, {"recv #2", "gave up waiting for rank 0"},
                             kDeadline_s + 3.5);
  };
  const double started = monotonic_seconds();
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
  EXPECT_LT(monotonic_seconds() - started, 14.0) << "leaving ends, too";
}

}  // namespace
}  // namespace trireme
