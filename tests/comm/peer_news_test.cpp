// Whether a rank can still be waited for: its process on this host, or what it has published.
#include "trireme/comm/peer_news.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "trireme/comm/progress_board.h"

namespace trireme::comm {
namespace {

/// A process that waits to be killed.
class Victim {
 public:
  Victim() : pid_(::fork()) {
    while (pid_ == 0) ::pause();
  }
  Victim(const Victim&) = delete;
  Victim& operator=(const Victim&) = delete;
  ~Victim() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  ProcessId id() const { return {.host = host_identity(), .pid = pid_, .started = started_at(pid_)}; }
  /// It is a zombie then, since nobody has waited for it.
  void kill() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_;
};

TEST(ProcessId, TextComesBackAndOtherTextIsNobody) {
  const ProcessId mine = own_process(), back = parse_process(to_text(mine));
  EXPECT_EQ(back.host, mine.host);
  EXPECT_EQ(back.pid, ::getpid());
  EXPECT_EQ(back.started, mine.started);
  for (const char* text : {"", "host", "host pid 3", "host 3"})
    EXPECT_FALSE(has_died(parse_process(text))) << text;
}

TEST(ProcessId, AProcessDiesOnceAndOnlyThoseOfThisHostAreKnown) {
  const Victim victim;
  const ProcessId id = victim.id();
  EXPECT_FALSE(has_died(own_process()));
  EXPECT_FALSE(has_died(id));
  ProcessId later = id;
  later.started += 1;
  EXPECT_TRUE(has_died(later)) << "another process has this pid now";
  victim.kill();
  EXPECT_TRUE(has_died(id)) << "a zombie does not answer";
  ProcessId elsewhere = id;
  elsewhere.host = "another";
  EXPECT_FALSE(has_died(elsewhere));
}

TEST(PeerNews, NamesTheRankThatDiedAndTheOneThatHasReportedAFailure) {
  constexpr auto kPeriod = std::chrono::milliseconds(50);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int64_t rank : {0, 1, 2, 3}) ProgressBoard::enter(*store, rank);
  const Victim victim;
  const auto board = std::make_shared<ProgressBoard>(
      store, 0, ProgressBoard::Options{.period = kPeriod, .listens = true, .host = "rank 0"});
  const ProcessId elsewhere{.host = "another", .pid = 1, .started = 1};
  const PeerNews news({own_process(), victim.id(), elsewhere, elsewhere}, board);
  EXPECT_EQ(news.about({0, 1, 2, 3}), "");
  ProgressBoard of_rank_3(store, 3);
  of_rank_3.report_failure({"all_gather", 7, "dp"}, {2, 3});
  std::this_thread::sleep_for(4 * kPeriod);
  EXPECT_EQ(news.about({0, 1, 2, 3}), "rank 3 failed in all_gather #7 of group dp");
  EXPECT_EQ(news.about({0, 1, 2}), "") << "not of this group";
  victim.kill();
  EXPECT_EQ(news.about({0, 1, 2}).substr(0, 15), "rank 1 (process");
  EXPECT_EQ(news.about({17}), "") << "there is no such rank";
}

/// System calls of this process that have read something.
int64_t reads_so_far() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  for (int64_t count = 0; counters >> name >> count;) {
    if (name == "syscr:") return count;
  }
  return -1;
}

TEST(PeerNews, RanksOfOtherHostsAndOfThisProcessCostNoFiles) {
  if (reads_so_far() < 0) GTEST_SKIP() << "/proc/self/io does not tell here";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProgressBoard::enter(*store, 0);
  const auto board = std::make_shared<ProgressBoard>(store, 0);
  std::vector<ProcessId> processes(1000, {.host = "another", .pid = 1, .started = 1});
  std::fill_n(processes.begin(), 8, own_process());
  std::vector<int64_t> ranks(processes.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const PeerNews news(processes, board);
  const int64_t before = reads_so_far();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(news.about(ranks), "");
  EXPECT_LT(reads_so_far() - before, 100);
}

}  // namespace
}  // namespace trireme::comm
