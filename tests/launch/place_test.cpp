// The parts that decide what a rank is told: cores, environment, socket.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <filesystem>
#include <fstream>

#include "tests/launch/job_process.h"
#include "trireme/launch/cores.h"
#include "trireme/launch/listen.h"
#include "trireme/launch/rank_env.h"

namespace trireme::launch {
namespace {

TEST(Cores, QuotaIsTimePerPeriod) {
  EXPECT_EQ(quota_of_cpu_max("150000 100000"), 1.5);
  EXPECT_EQ(quota_of_cpu_max("50000 100000\n"), 0.5);
}

TEST(Cores, NoQuotaWhereNoneIsSet) {
  for (const char* text : {"max 100000", "", "100000", "1000 0", "0 1000", "-1 100000", "many 100000"}) {
    EXPECT_EQ(quota_of_cpu_max(text), std::nullopt) << text;
  }
}

TEST(Cores, AreBoundedByTheQuotaOfAGroupAroundThisProcess) {
  const TempDir root;
  std::filesystem::create_directories(root.file("proc/self"));
  std::filesystem::create_directories(root.file("sys/fs/cgroup/job/step"));
  std::filesystem::create_directories(root.file("sys/fs/cgroup/cpu/job"));
  std::ofstream(root.file("proc/self/cgroup")) << "0::/job/step\n3:cpu,cpuacct:/job\n";
  EXPECT_EQ(usable_cores(root.path()), usable_cores("/nowhere"));
  std::ofstream(root.file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us")) << "-1\n";
  std::ofstream(root.file("sys/fs/cgroup/cpu/job/cpu.cfs_period_us")) << "100000\n";
  EXPECT_EQ(usable_cores(root.path()), usable_cores("/nowhere"));
  std::ofstream(root.file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us")) << "150000\n";
  EXPECT_EQ(usable_cores(root.path()), 1) << "version 1";
  std::ofstream(root.file("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us")) << "-1\n";
  std::ofstream(root.file("sys/fs/cgroup/job/cpu.max")) << "100000 100000\n";
  EXPECT_EQ(usable_cores(root.path()), 1) << "version 2";
}

TEST(Cores, FollowTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), CPU_COUNT(&before));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cores(), 1);
  ::sched_setaffinity(0, sizeof before, &before);
}

TEST(RankEnvironment, AddsThePlaceAndKeepsTheRest) {
  const Environment base({{"HOME", "/home/me"}, {"RANK", "7"}});
  const Environment made =
      rank_environment(base, {.rank = 2, .ranks = 4, .port = 4567, .listen_fd = -1, .threads = 3});
  const std::map<std::string, std::string> expected{{"HOME", "/home/me"},
                                                    {"RANK", "2"},
                                                    {"WORLD_SIZE", "4"},
                                                    {"LOCAL_RANK", "2"},
                                                    {"LOCAL_WORLD_SIZE", "4"},
                                                    {"MASTER_PORT", "4567"},
                                                    {"MASTER_ADDR", "127.0.0.1"},
                                                    {"OMP_NUM_THREADS", "3"},
                                                    {"TRIREME_LAUNCHER", "trireme"}};
  EXPECT_EQ(made.variables(), expected);
}

TEST(RankEnvironment, LeavesTheUsersThreadCountAlone) {
  Environment base;
  base.set("OMP_NUM_THREADS", "5");
  const Environment made = rank_environment(base, {.threads = 3});
  EXPECT_EQ(made.get("OMP_NUM_THREADS"), "5");
}

TEST(RankEnvironment, RemovesWhatAnOuterLauncherSaidOfItsOwnRanks) {
  const Environment outer({{"TRIREME_LISTEN_FD", "3"},
                           {"TRIREME_TTY_FD", "8"},
                           {"TRIREME_OUT_TTY_FD", "9"},
                           {"TRIREME_FLIGHT_FD", "7"},
                           {"TRIREME_JOB_KEY", "outer"},
                           {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                           {"GROUP_RANK", "1"}});
  const Environment made = rank_environment(outer, {});
  for (const auto& [name, value] : outer.variables()) EXPECT_FALSE(made.get(name)) << name;
}

TEST(RankEnvironment, GivesSocketAndTerminalOnlyWhereThereAre) {
  const Environment made =
      rank_environment(Environment(), {.listen_fd = 5, .tty_fd = 6, .out_tty_fd = 7, .flight_fd = 8});
  EXPECT_EQ(made.get("TRIREME_LISTEN_FD"), "5");
  EXPECT_EQ(made.get("TRIREME_TTY_FD"), "6");
  EXPECT_EQ(made.get("TRIREME_OUT_TTY_FD"), "7");
  EXPECT_EQ(made.get("TRIREME_FLIGHT_FD"), "8");
  EXPECT_FALSE(rank_environment(Environment(), {}).get("TRIREME_FLIGHT_FD"));
}

TEST(ListenSocket, IsBoundToLoopbackAtThePortItNames) {
  const ListenSocket one = listen_on_loopback(), other = listen_on_loopback();
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ASSERT_EQ(::getsockname(one.fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  EXPECT_EQ(ntohl(address.sin_addr.s_addr), INADDR_LOOPBACK);
  EXPECT_EQ(ntohs(address.sin_port), one.port);
  EXPECT_NE(one.port, other.port);
}

}  // namespace
}  // namespace trireme::launch
