#include "trireme/launch/crash_report.h"

#include <gtest/gtest.h>

#include <csignal>

#include "trireme/base/error.h"

namespace trireme::launch {
namespace {

Flight flight(std::vector<FlightEntry> entries) {
  return {.joined = true, .entries = std::move(entries), .groups = {{"dp", {0, 1, 2}}}};
}

FlightEntry in(char state, int64_t sequence, double since) {
  return {.state = state, .sequence = sequence, .since = since, .operation = "all_gather", .group = "dp"};
}

RankExit exited(int64_t rank, int code) {
  return {.rank = rank, .pid = 100 + static_cast<pid_t>(rank), .end = {.code = code}};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Rank 1 stands still after #6; the others wait for it in #7.
JobEnd frozen() {
  JobEnd end{.code = 5, .cause = exited(0, 5)};
  end.exits = {exited(0, 5),
               exited(2, 5),
               {.rank = 1, .pid = 101, .end = {.signal = SIGKILL}, .asked = true, .stuck = 'T'}};
  end.flights = {flight({in('d', 6, 990.0), in('f', 7, 999.0)}), flight({in('d', 6, 990.0)}),
                 flight({in('f', 7, 999.5)})};
  return end;
}

TEST(CrashReport, ARankThatStandsStillIsTheCauseAndNotTheOneThatNoticed) {
  const JobEnd end = frozen();
  EXPECT_EQ(missed_by(end, 0), std::vector<int64_t>{1});
  EXPECT_EQ(missed_by(end, 2), std::vector<int64_t>{1});
  EXPECT_TRUE(missed_by(end, 1).empty()) << "it waits for nobody";
  EXPECT_EQ(first_to_fail(end), 1);
  EXPECT_EQ(cause_in_words(end),
            "rank 0 (pid 100) exited with code 5 (lost a peer or timed out): it was waiting for rank 1 in "
            "all_gather #7 of group dp; rank 1 (pid 101) did not stop when told to and was killed (it had "
            "been stopped by a signal)");
}

TEST(CrashReport, ARankMayStandStillInsideOfWhatTheOthersWaitIn) {
  JobEnd end = frozen();
  end.flights[1].entries.push_back(in('i', 7, 991.0));
  EXPECT_TRUE(missed_by(end, 0).empty());
  EXPECT_EQ(first_to_fail(end), 1);
  EXPECT_TRUE(contains(cause_in_words(end), "(it had been stopped by a signal)")) << cause_in_words(end);
}

TEST(CrashReport, SaysOfEachRankHowItEndedAndWhatItDidLast) {
  EXPECT_EQ(
      crash_report(frozen(), 1000.0),
      cause_in_words(frozen()) +
          "\n\nWhat each rank was doing last:\n"
          "  rank 0 (pid 100) exited with code 5 (lost a peer or timed out)\n"
          "    it gave up on all_gather #7 of group dp 1.0 s earlier, waiting for rank 1\n"
          "    before that: all_gather #6 of group dp\n"
          "  rank 1 (pid 101) did not stop when told to and was killed (it had been stopped by a signal)\n"
          "    it had finished all_gather #6 of group dp 10.0 s earlier\n"
          "  rank 2 (pid 102) exited with code 5 (lost a peer or timed out)\n"
          "    it gave up on all_gather #7 of group dp 0.5 s earlier, waiting for rank 1\n");
}

TEST(CrashReport, OneThatWasKilledIsTheCauseWhereverItWas) {
  JobEnd end{.code = 137};
  end.cause = RankExit{.rank = 2, .pid = 102, .end = {.signal = SIGKILL}};
  end.exits = {*end.cause, exited(0, 5), exited(1, 5)};
  FlightEntry inside = in('i', 7, 998.0);
  inside.subject = "blocks.1";
  end.flights = {flight({inside}), flight({in('f', 7, 999.0)}), flight({in('d', 6, 990.0)})};
  EXPECT_EQ(first_to_fail(end), 2);
  EXPECT_EQ(cause_in_words(end), "rank 2 (pid 102) was killed by signal 9 (SIGKILL)");
  const std::string report = crash_report(end, 1000.0);
  EXPECT_TRUE(
      contains(report, "it was in all_gather #7 for blocks.1 of group dp for 2.0 s, waiting for rank 2"))
      << report;
}

TEST(CrashReport, KnowsLessWhereRanksHadNotMetOrNothingWasKept) {
  JobEnd end{.code = 5, .cause = exited(0, 5)};
  end.exits = {exited(0, 5), exited(1, 5)};
  EXPECT_EQ(first_to_fail(end), 0);
  EXPECT_EQ(cause_in_words(end), describe(*end.cause));
  end.flights = {{.joined = true}, {}};
  const std::string report = crash_report(end, 1000.0);
  EXPECT_TRUE(contains(report, "it had not communicated yet\n")) << report;
  EXPECT_TRUE(contains(report, "it had not joined the other ranks yet, or it is the only rank\n")) << report;
  end.flights = {{.joined = true, .entries = {in('f', 7, 0.0)}}, {.joined = true}};
  EXPECT_TRUE(missed_by(end, 0).empty()) << "nobody knows who is in its group";
  EXPECT_THROW(cause_in_words({.code = 0}), LogicError);
}

}  // namespace
}  // namespace trireme::launch
