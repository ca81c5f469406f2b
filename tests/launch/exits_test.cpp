#include "trireme/launch/exits.h"

#include <gtest/gtest.h>

#include <csignal>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/launch/restarts.h"

namespace trireme::launch {
namespace {

RankExit with_code(int64_t rank, int code) {
  return {.rank = rank, .pid = 100, .end = {.code = code}};
}
RankExit with_signal(int64_t rank, int number) {
  return {.rank = rank, .pid = 100, .end = {.signal = number}};
}

TEST(ExitCode, IsThatOfTheProcessOr128PlusTheSignal) {
  for (int code : {0, 1, 75, 255}) EXPECT_EQ(exit_code(with_code(0, code)), code);
  for (int number : {SIGKILL, SIGSEGV, SIGTERM}) EXPECT_EQ(exit_code(with_signal(0, number)), 128 + number);
}

TEST(StoppedInOrder, HoldsForTheSignalsThatAskToStopAndForPreempted) {
  for (int code = 0; code < 256; ++code) {
    const bool in_order = code == 129 || code == 130 || code == 138 || code == 143 || code == 75;
    EXPECT_EQ(stopped_in_order(with_code(0, code)), in_order) << code;
  }
  EXPECT_TRUE(stopped_in_order(with_signal(0, SIGINT)));
  EXPECT_TRUE(stopped_in_order(with_signal(0, SIGTERM)));
  EXPECT_FALSE(stopped_in_order(with_signal(0, SIGKILL)));
}

TEST(Hung, IsCommunicationNamesTheSilenceAndComesBeforeThoseThatLostIt) {
  RankExit hung = with_signal(1, SIGKILL);
  hung.hung_s = 20.0;
  hung.stuck = 'D';
  EXPECT_EQ(exit_code(hung), 5);
  EXPECT_FALSE(lost_a_peer(hung));
  EXPECT_EQ(
      describe(hung),
      "rank 1 (pid 100) gave no sign of life for 20 s and was killed (it was blocked in a kernel call)");
  EXPECT_EQ(culprit(std::vector<RankExit>{with_code(0, 5), hung}).rank, 1);
  EXPECT_TRUE(may_start_again({.code = 5, .cause = hung}));
}

TEST(Culprit, PrefersASignalToACodeAndACodeToALostPeer) {
  const std::vector<RankExit> failures{with_code(0, 5), with_code(1, 6), with_signal(2, SIGKILL),
                                       with_code(3, 1)};
  EXPECT_EQ(culprit(failures).rank, 2);
  const std::vector<RankExit> no_signal{with_code(0, 5), with_code(1, 6)};
  EXPECT_EQ(culprit(no_signal).rank, 1);
}

TEST(Culprit, PrefersARankThatWasNotAskedToStop) {
  RankExit asked = with_signal(0, SIGTERM);
  asked.asked = true;
  const std::vector<RankExit> failures{asked, with_code(1, 5)};
  EXPECT_EQ(culprit(failures).rank, 1);
}

TEST(Culprit, PrefersTheEarlierOfEquals) {
  std::vector<RankExit> failures{with_code(0, 1), with_code(1, 1)};
  failures[0].at = 2.0;
  failures[1].at = 1.0;
  EXPECT_EQ(culprit(failures).rank, 1);
}

TEST(Culprit, RefusesToBlameNobody) {
  EXPECT_THROW(culprit({}), LogicError);
}

TEST(Describe, NamesRankPidAndCause) {
  EXPECT_EQ(describe(with_signal(1, SIGKILL)), "rank 1 (pid 100) was killed by signal 9 (SIGKILL)");
  EXPECT_EQ(describe(with_code(2, 1)), "rank 2 (pid 100) exited with code 1");
  EXPECT_NE(describe(with_code(2, 4)).find("code 4 (out of memory)"), std::string::npos);
  EXPECT_EQ(describe(with_code(2, 4), /*ours=*/false), "rank 2 (pid 100) exited with code 4");
}

TEST(Describe, HintsAtTheOomKillerForSigkillOnly) {
  EXPECT_NE(hint(with_signal(0, SIGKILL)).find("OOM killer"), std::string::npos);
  EXPECT_EQ(hint(with_signal(0, SIGSEGV)), "");
  EXPECT_EQ(hint(with_code(0, 9)), "");
}

}  // namespace
}  // namespace trireme::launch
