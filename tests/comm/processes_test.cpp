// Joining over TCP with ranks as processes, and what they say when one of them is missing or dies.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <filesystem>
#include <iterator>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tests/comm/processes.h"
#include "trireme/base/clock.h"
#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/comm/group.h"
#include "trireme/comm/rendezvous.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using comm::World;
using plan::WorldSpec;
using test::expect_comm_error;
using test::fork_ranks;
using test::free_port;
using Codes = std::vector<int>;

WorldSpec spec_of(int64_t rank, int64_t size, int64_t port) {
  WorldSpec spec;
  spec.rank = rank;
  spec.world_size = size;
  spec.local_rank = rank;
  spec.local_world_size = size;
  spec.master_port = port;
  return spec;
}

std::shared_ptr<World> join(const WorldSpec& spec, double timeout_s = 20.0) {
  return World::join(spec, c10::kCPU, timeout_s);
}

/// 0 when an all-reduce over the world gives n(n-1)/2.
int sum_of_ranks(World& world) {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < world.size(); ++r) ranks.push_back(r);
  const auto group = world.make_group("all", ranks);
  at::Tensor tensor = at::full({5}, static_cast<double>(world.rank()));
  group->all_reduce(tensor, comm::ReduceOp::kSum);
  const double wanted = static_cast<double>(world.size() * (world.size() - 1)) / 2.0;
  return (tensor == wanted).all().item<bool>() ? 0 : 1;
}

TEST(Processes, JoinOverTcpAndReduce) {
  const int64_t port = free_port();
  EXPECT_EQ(fork_ranks(3, [&](int64_t rank) { return sum_of_ranks(*join(spec_of(rank, 3, port))); }),
            (Codes{0, 0, 0}));
}

std::vector<size_t> own_cores() {
  cpu_set_t mask;
  EXPECT_EQ(::sched_getaffinity(0, sizeof mask, &mask), 0);
  std::vector<size_t> cores;
  for (size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) cores.push_back(core);
  }
  return cores;
}

/// Threads of two ranks after joining, by rank. Each is bound to the core that is its own, if there are any.
Codes threads_of_two(const char* omp_num_threads, const std::vector<size_t>& cores = {}) {
  const int64_t port = free_port();
  return fork_ranks(2, [&](int64_t rank) {
    ::unsetenv("OMP_NUM_THREADS");
    if (omp_num_threads != nullptr) ::setenv("OMP_NUM_THREADS", omp_num_threads, 1);
    if (!cores.empty()) {
      cpu_set_t mask;
      CPU_ZERO(&mask);
      CPU_SET(cores[static_cast<size_t>(rank)], &mask);
      ::sched_setaffinity(0, sizeof mask, &mask);
    }
    at::set_num_threads(50);
    const auto world = join(spec_of(rank, 2, port));
    return sum_of_ranks(*world) == 0 ? at::get_num_threads() : 99;
  });
}

TEST(Processes, DivideTheCoresThatTheyShareUnlessTheyWereToldTheirThreads) {
  const int half = static_cast<int>(std::max<int64_t>(1, usable_cores() / 2));
  EXPECT_EQ(threads_of_two(nullptr), (Codes{half, half}));
  EXPECT_EQ(threads_of_two("3"), (Codes{50, 50}));
  const std::vector<size_t> cores = own_cores();
  if (cores.size() < 2) return;
  EXPECT_EQ(threads_of_two(nullptr, cores), (Codes{50, 50})) << "torch's own number for bound ranks";
}

TEST(Processes, JoinOnASocketInheritedFromTheLauncher) {
  const test::Listener listener = test::listen_on_loopback();
  const auto body = [&](int64_t rank) {
    WorldSpec spec = spec_of(rank, 3, listener.port);
    if (rank == 0) spec.listen_fd = listener.fd;
    if (rank != 0) ::close(listener.fd);
    return sum_of_ranks(*join(spec));
  };
  EXPECT_EQ(fork_ranks(3, body), (Codes{0, 0, 0}));
  ::close(listener.fd);
}

TEST(Processes, JoinTheirNextWorldsOnTheSameSocket) {
  const test::Listener listener = test::listen_on_loopback();
  const auto body = [&](int64_t rank) {
    WorldSpec spec = spec_of(rank, 3, listener.port);
    if (rank == 0) spec.listen_fd = listener.fd;
    if (rank != 0) ::close(listener.fd);
    for (int i = 0; i < 3; ++i) {
      if (sum_of_ranks(*join(spec)) != 0) return 1;
    }
    const auto one = join(spec), other = join(spec);
    return sum_of_ranks(*one) + sum_of_ranks(*other);
  };
  EXPECT_EQ(fork_ranks(3, body), (Codes{0, 0, 0}));
  ::close(listener.fd);
}

TEST(Processes, JoinTheirNextWorldsAtTheSamePort) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    for (int i = 0; i < 4; ++i) {
      if (sum_of_ranks(*join(spec_of(rank, 3, port))) != 0) return 1;
    }
    return 0;
  };
  EXPECT_EQ(fork_ranks(3, body), (Codes{0, 0, 0}));
}

TEST(Processes, JoinAndLeaveAtOnceHarmsNobody) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(spec_of(rank, 3, port));
    return world->share_from_root("key", "text") == "text" ? 0 : 1;
  };
  EXPECT_EQ(fork_ranks(3, body), (Codes{0, 0, 0}));
}

TEST(Processes, MissingRankIsNamedWithinTheDeadline) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    return expect_comm_error([&] { join(spec_of(rank, 3, port), 3.0); },
                             {fmt::format("127.0.0.1:{}", port), "rank 2 of 3", "waited"}, 6.0);
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

/// Either of the two may come second: which one does is up to the scheduler. The others go on without it.
TEST(Processes, ARankThatComesTwiceIsNamedAtOnce) {
  const int64_t port = free_port();
  constexpr int kSecond = 5;
  const test::Gate refused;
  const auto body = [&](int64_t process) {
    const int64_t rank = process == 3 ? 2 : std::min<int64_t>(process, 1);
    if (rank == 2 && !refused.wait(20.0)) return 99;
    const double started = monotonic_seconds();
    try {
      return sum_of_ranks(*join(spec_of(rank, 3, port), 60.0));
    } catch (const CommError& error) {
      const std::string text = error.what();
      const auto has = [&](const char* words) { return text.find(words) != std::string::npos; };
      refused.open();
      const bool in_time = monotonic_seconds() - started < 8.0;
      if (in_time && has("two processes joined as rank 1") && has("on host") && has("its own RANK"))
        return kSecond;
      std::cerr << text << "\n";
    }
    return 1;
  };
  Codes codes = fork_ranks(4, body, 90.0);
  std::sort(codes.begin(), codes.end());
  EXPECT_EQ(codes, (Codes{0, 0, 0, kSecond}));
}

TEST(Processes, TwoProcessesThatAreRankZeroAreBothNamed) {
  const int64_t port = free_port();
  const test::Gate joined;
  const auto body = [&](int64_t process) {
    if (process == 0) {
      return expect_comm_error(
          [&] {
            std::thread opener([&] {
              while (test::listening_addresses(port).empty()) {
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
              }
              joined.open();
            });
            opener.detach();
            join(spec_of(0, 2, port), 4.0);
          },
          {"rank 1 of 2"}, 8.0);
    }
    if (!joined.wait(10.0)) return 99;
    return expect_comm_error([&] { join(spec_of(0, 2, port), 20.0); },
                             {"two processes joined as rank 0", "on host", "its own RANK"}, 5.0);
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

TEST(Processes, RanksThatDifferInTheSizeOfTheWorldSaySo) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    return expect_comm_error(
        [&] { join(spec_of(rank, 2 + rank, port), 20.0); },
        {"the ranks differ in WORLD_SIZE", "rank 0 on host", "rank 1 on host", "give all the same"}, 8.0);
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

TEST(Processes, MeetAtAnAddressOfIpv6InBrackets) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    WorldSpec spec = spec_of(rank, 2, port);
    spec.master_addr = "[::1]";
    return sum_of_ranks(*join(spec));
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

constexpr int kNamed = 7, kLostTheOther = 8;

/// The codes of two ranks, each of which may open `more` descriptors: 0 where it has joined and made a group,
/// kNamed where it has named the limit, kLostTheOther where the other rank may have. An abort in torch is
/// none.
Codes join_with_few_descriptors(int64_t more) {
  const int64_t port = free_port();
  return fork_ranks(2, [&](int64_t rank) {
    const int64_t open = std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                       std::filesystem::directory_iterator()) -
                         1;  // the directory itself
    const auto most = static_cast<rlim_t>(open + more);
    const rlimit few{.rlim_cur = most, .rlim_max = most};
    ::setrlimit(RLIMIT_NOFILE, &few);
    try {
      // Where rank 0 has no store to offer, the other one waits for it in vain.
      return sum_of_ranks(*join(spec_of(rank, 2, port), more <= 12 ? 1.0 : 20.0));
    } catch (const EnvironmentError& error) {
      return std::string(error.what()).find("ulimit -n") == std::string::npos ? 2 : kNamed;
    } catch (const CommError&) {
      return rank == 0 ? 3 : kLostTheOther;  // rank 0 hosts the store, and needs the most
    }
  });
}

TEST(Processes, ALimitOfOpenFilesIsNamedAsTheCause) {
  for (const int64_t more : {1, 4, 8})
    EXPECT_EQ(join_with_few_descriptors(more), (Codes{kNamed, kNamed})) << more << " more";
  for (const int64_t more : {10, 12, 14, 16, 18, 20, 22, 24}) {
    const Codes codes = join_with_few_descriptors(more);
    const bool both = codes == Codes{0, 0};
    EXPECT_TRUE(both || (codes[0] == kNamed && (codes[1] == kNamed || codes[1] == kLostTheOther)))
        << more << " more: " << codes[0] << " and " << codes[1];
  }
  EXPECT_EQ(join_with_few_descriptors(40), (Codes{0, 0}));
}

/// A process joins as the rank, and is killed while it waits for the others.
void come_and_die(const WorldSpec& spec) {
  const test::Gate arrived;
  const pid_t child = ::fork();
  if (child == 0) {
    const comm::Rendezvous met = comm::open_rendezvous(spec, 20.0);
    comm::claim_rank(*met.store, spec.rank);
    arrived.open();
    join(spec);
    ::_exit(1);
  }
  EXPECT_TRUE(arrived.wait(20.0));
  std::this_thread::sleep_for(
      std::chrono::milliseconds(200));  // most times it has greeted the others by then
  ::kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status)) << "it ended before it was killed";
}

TEST(Processes, ARankThatDiedMayComeAgain) {
  const int64_t port = free_port();
  const test::Gate died;
  const auto body = [&](int64_t rank) {
    const WorldSpec spec = spec_of(rank, 3, port);
    if (rank == 1) {
      come_and_die(spec);
      died.open();
    }
    if (rank == 2 && !died.wait(45.0)) return 99;
    const int code = sum_of_ranks(*join(spec, 60.0));
    return ::testing::Test::HasFailure() ? 98 : code;
  };
  EXPECT_EQ(fork_ranks(3, body, 90.0), (Codes{0, 0, 0}));
}

TEST(Processes, NobodyListeningNamesTheAddress) {
  const int64_t port = free_port();
  const auto body = [&](int64_t) {
    return expect_comm_error([&] { join(spec_of(1, 2, port), 1.0); },
                             {fmt::format("127.0.0.1:{}", port), "rank 1 of 2", "check that rank 0 runs"},
                             4.0);
  };
  EXPECT_EQ(fork_ranks(1, body), (Codes{0}));
}

TEST(Processes, PortInUseIsSaidAtOnce) {
  const test::Listener listener = test::listen_on_loopback();
  const auto body = [&](int64_t) {
    return expect_comm_error(
        [&] { join(spec_of(0, 2, listener.port)); },
        {fmt::format("port {} on 127.0.0.1 is in use", listener.port), "another MASTER_PORT"}, 3.0);
  };
  EXPECT_EQ(fork_ranks(1, body), (Codes{0}));
  ::close(listener.fd);
}

TEST(Processes, APortThatAcceptsAndSaysNothingIsGivenUp) {
  const test::Listener listener = test::listen_on_loopback();  // the kernel accepts; nobody ever answers
  const auto body = [&](int64_t) {
    return expect_comm_error(
        [&] { join(spec_of(1, 2, listener.port), 1.0); },
        {fmt::format("found no store at 127.0.0.1:{}", listener.port), "nothing else listens"}, 3.0);
  };
  EXPECT_EQ(fork_ranks(1, body), (Codes{0}));
  ::close(listener.fd);
}

TEST(Processes, AFrozenHostOfTheStoreHoldsNobodyPastTheDeadline) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(spec_of(rank, 3, port), 2.0);
    const auto group = world->make_group("dp", {0, 1, 2});
    at::Tensor tensor = at::ones({8});
    group->all_reduce(tensor, comm::ReduceOp::kSum);
    const pid_t rank0 = std::stoi(world->share_from_root("pid", std::to_string(::getpid())));
    group->barrier();
    if (rank == 0) ::raise(SIGSTOP);
    const int code = expect_comm_error(
        [&] { group->all_reduce(tensor, comm::ReduceOp::kSum); },
        {"all_reduce #3 of group dp", fmt::format("rank 0 at 127.0.0.1:{}", port), "hangs"}, 5.0);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::seconds(1));  // rank 2 is about to report, too
    if (rank == 1) ::kill(rank0, SIGKILL);
    return code;
  };
  const double started = monotonic_seconds();
  EXPECT_EQ(fork_ranks(3, body), (Codes{-SIGKILL, 0, 0}));
  EXPECT_LT(monotonic_seconds() - started, 12.0) << "leaving ends, too";
}

TEST(Processes, TwoHostsThatLoseEachOtherBothEndAndSayWhoIsMissing) {
  const test::TwoHosts hosts;
  if (!hosts.made()) GTEST_SKIP() << "no network namespaces here: they take root and iproute2";
  constexpr double kDeadline_s = 2.0;
  const auto body = [&](int64_t rank) {
    hosts.enter(rank);
    WorldSpec spec = spec_of(rank, 2, 29500);
    spec.master_addr = test::TwoHosts::address(0);
    spec.local_rank = 0;
    spec.local_world_size = 1;
    // These hosts share the kernel, and with it memory, which real ones do not.
    const auto world = World::join(spec, c10::kCPU, kDeadline_s, {.share = false});
    const auto group = world->make_group("dp", {0, 1});
    at::Tensor tensor = at::ones({8});
    group->all_reduce(tensor, comm::ReduceOp::kSum);
    group->barrier();
    if (rank == 0) hosts.part();
    const std::string missing = rank == 0 ? "rank 1 has not" : "rank 0 at 10.99.0.1:29500";
    return expect_comm_error([&] { group->all_reduce(tensor, comm::ReduceOp::kSum); },
                             {"all_reduce #3 of group dp", "passed its deadline", missing},
                             kDeadline_s + 3.5);
  };
  const double started = monotonic_seconds();
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
  EXPECT_LT(monotonic_seconds() - started, 12.0) << "leaving ends, too";
}

TEST(Processes, RanksOfAnotherJobKeyNeverMeet) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    WorldSpec spec = spec_of(rank, 2, port);
    spec.job_key = rank == 0 ? "one" : "two";
    return expect_comm_error([&] { join(spec, 3.0); }, {fmt::format("rank {} of 2", 1 - rank)}, 6.0);
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

TEST(Processes, AddressOfAnotherHostIsRefusedForRank0) {
  const auto body = [](int64_t) {
    WorldSpec spec = spec_of(0, 2, free_port());
    spec.master_addr = "192.0.2.1";  // RFC 5737: nobody has it
    return expect_comm_error([&] { join(spec); }, {"192.0.2.1", "host that runs rank 0"}, 1.0);
  };
  EXPECT_EQ(fork_ranks(1, body), (Codes{0}));
}

TEST(Processes, AgentsStoreServesSeveralAttempts) {
  const auto body = [](int64_t process) {
    static const int64_t port = free_port();
    if (process != 0) return 0;
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.port = static_cast<uint16_t>(port);
    options.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    const auto worker = [&](int64_t rank) {
      WorldSpec spec = spec_of(rank, 2, port);
      spec.agent_store = true;
      for (spec.restart = 0; spec.restart < 2; ++spec.restart) {
        for (int world = 0; world < 2; ++world) {
          if (sum_of_ranks(*join(spec)) != 0) return 1;
        }
      }
      return 0;
    };
    return fork_ranks(2, worker) == Codes{0, 0} ? 0 : 1;
  };
  EXPECT_EQ(fork_ranks(1, body), (Codes{0}));
}

TEST(Processes, StoreListensOnLoopbackOnly) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(spec_of(rank, 2, port));
    const std::vector<std::string> addresses = test::listening_addresses(port);
    for (const auto& address : addresses) fmt::print(stderr, "listening: {}\n", address);
    return addresses == std::vector<std::string>{"0100007F"} ? 0 : 1;
  };
  EXPECT_EQ(fork_ranks(2, body), (Codes{0, 0}));
}

TEST(Processes, ARankKilledInsideACollectiveFailsTheOthersFast) {
  const int64_t port = free_port();
  const auto body = [&](int64_t rank) {
    const auto world = join(spec_of(rank, 3, port), 60.0);
    const auto group = world->make_group("dp", {0, 1, 2});
    at::Tensor tensor = at::ones({8});
    group->all_reduce(tensor, comm::ReduceOp::kSum);
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1300));  // its board says that it was in #1
      ::kill(::getpid(), SIGKILL);
    }
    return expect_comm_error(
        [&] { group->all_reduce(tensor, comm::ReduceOp::kSum); },
        {"all_reduce #2 of group dp", "lost a peer", "rank 2 was last seen before all_reduce #2"}, 6.0);
  };
  EXPECT_EQ(fork_ranks(3, body), (Codes{0, 0, -SIGKILL}));
}

TEST(Processes, AWorldOfOneNeedsNoNetwork) {
  const auto world = join(spec_of(0, 1, 0), 1.0);
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(sum_of_ranks(*world), 0);
}

}  // namespace
}  // namespace trireme
