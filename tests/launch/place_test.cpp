// The parts that decide what a rank is told: environment, socket.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tests/launch/job_process.h"
#include "trireme/launch/listen.h"
#include "trireme/launch/rank_env.h"

namespace trireme::launch {
namespace {

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
