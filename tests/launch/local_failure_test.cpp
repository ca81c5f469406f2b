// A rank fails: whose code the job returns, what is said, and how the others are stopped.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

#include "tests/launch/job_process.h"
#include "trireme/base/file.h"

namespace trireme::launch {
namespace {

bool says(const Outcome& outcome, const std::string& text) {
  return outcome.err.find(text) != std::string::npos;
}

TEST(LocalFailure, ReturnsTheCodeOfTheRankThatFailed) {
  for (int code : {1, 2, 3, 4, 5, 6, 7, 8, 75, 255}) {
    const Outcome outcome = run(child_job(3, {fmt::format("1:exit={}", code)}));
    EXPECT_EQ(outcome.code, code);
    EXPECT_TRUE(says(outcome, "error: [launch] rank 1 (pid ")) << outcome.err;
    EXPECT_TRUE(says(outcome, fmt::format(") exited with code {}", code))) << outcome.err;
  }
}

TEST(LocalFailure, Returns128PlusNForSignalN) {
  for (int number : {SIGABRT, SIGSEGV, SIGKILL, SIGTERM}) {
    EXPECT_EQ(run(child_job(2, {fmt::format("1:kill={}", number)})).code, 128 + number);
  }
}

TEST(LocalFailure, SaysWhichRankWasKilledByWhatAndHowManyAreStopped) {
  LocalJob job = child_job(4, {"1:kill=9", "sleep=30"});
  job.grace_s = 0.2;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_TRUE(says(outcome, "was killed by signal 9 (SIGKILL); stopping the other 3 ranks")) << outcome.err;
  EXPECT_TRUE(says(outcome, "OOM killer")) << outcome.err;
  EXPECT_LT(outcome.seconds, 5.0);
}

TEST(LocalFailure, ShowsTheLastWordsOfTheRankBeforeItsEnd) {
  const Outcome outcome = run(child_job(3, {"2:err=it is over", "2:exit=6", "!2:sleep=0.1"}));
  EXPECT_LT(outcome.err.find("[r2] it is over"), outcome.err.find("rank 2 (pid")) << outcome.err;
}

TEST(LocalFailure, BlamesTheRankThatDiedAndNotTheOneThatNoticedFirst) {
  const Outcome outcome =
      run(child_job(3, {"0:exit=5", "2:sleep=0.1", "2:kill=11", "1:sleep=0.15", "1:exit=5"}));
  EXPECT_EQ(outcome.code, 128 + SIGSEGV);
  EXPECT_TRUE(says(outcome, "rank 2 (pid ")) << outcome.err;
  EXPECT_FALSE(says(outcome, "rank 0 (pid ")) << outcome.err;
}

TEST(LocalFailure, ARankThatLostItsPeersIsReportedWhenNobodyElseFails) {
  LocalJob job = child_job(2, {"0:exit=5", "1:sleep=30"});
  job.grace_s = 0.2;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(says(outcome, "exited with code 5")) << outcome.err;
}

TEST(LocalFailure, OthersMayReportBeforeTheyAreAskedToStop) {
  LocalJob job = child_job(2, {"1:exit=1", "0:sleep=0.5", "0:err=saved what I had"});
  job.grace_s = 4.0;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(says(outcome, "saved what I had")) << outcome.err;
  EXPECT_FALSE(says(outcome, "had to be killed")) << outcome.err;
}

LocalJob explaining(LocalJob job) {
  job.explains_failures = true;
  return job;
}

TEST(LocalFailure, WhatAllRanksHaveExplainedNeedsNoMoreWords) {
  const Outcome outcome = run(explaining(child_job(3, {"err=12:00:00 error: no such text", "exit=2"})));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err, "12:00:00 error: no such text (x3 ranks)\n");
}

TEST(LocalFailure, OneRankMaySpeakForAll) {
  const Outcome outcome = run(explaining(child_job(3, {"0:sleep=0.1", "0:err=no such text", "exit=2"})));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err, "no such text\n");
}

TEST(LocalFailure, ARankThatExplainsItselfIsHeardAloneAndNotThoseThatLostIt) {
  const TempDir dir;
  LocalJob job =
      explaining(child_job(3, {"0:sleep=0.1", "0:err=error: no memory", "0:exit=4", "1:err=error: lost",
                               "1:exit=5", "2:sleep=1.5", "2:err=error: lost too", "2:exit=5"}));
  job.log_dir = dir.path();
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 4);
  EXPECT_TRUE(says(outcome, "error: no memory")) << outcome.err;
  EXPECT_FALSE(says(outcome, "lost")) << outcome.err;
  EXPECT_EQ(lines_of(outcome.err).size(), 2u) << "and that the launcher stops the rest: " << outcome.err;
  EXPECT_EQ(read_file(dir.file("rank-1.log")), "error: lost\n");
}

TEST(LocalFailure, RanksThatOnlyLostAPeerAreHeard) {
  const Outcome outcome = run(explaining(child_job(2, {"err=error: lost", "exit=5"})));
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(says(outcome, "error: lost (x2 ranks)")) << outcome.err;
}

TEST(LocalFailure, ARankThatTheKernelKilledForWantOfMemoryIsOutOfMemory) {
  const TempDir dir;
  const std::string counters = dir.file("vmstat");
  write_file_atomic(counters, "pgfault 17\noom_kill 3\n");
  // Lines of output make the launcher look around while the process takes its time to die.
  LocalJob job =
      explaining(child_job(2, {"1:write=" + counters + " oom_kill 4", "1:err=one", "1:sleep=0.3", "1:err=two",
                               "1:sleep=0.3", "1:kill=9", "sleep=1.5", "err=error: lost", "exit=5"}));
  job.kernel_counters = counters;
  job.memory_advice = [] { return "Try a smaller model"; };
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 4);
  EXPECT_TRUE(
      says(outcome,
           "was killed by the kernel because memory ran out; stopping the other rank. Try a smaller model"))
      << outcome.err;
  EXPECT_FALSE(says(outcome, "lost")) << "its peers know less: " << outcome.err;
  job.args = {"1:kill=9", "sleep=30"};
  job.grace_s = 0.2;
  EXPECT_EQ(run(job).code, 128 + SIGKILL) << "the kernel has killed nobody since";
  job.starved_s = 0.2;
  job.args = {"1:write=" + counters + " oom_kill 5", "1:sleep=1", "1:kill=9", "sleep=30"};
  EXPECT_EQ(run(job).code, 128 + SIGKILL) << "what the kernel killed a while before was another process";
}

/// Whatever the kernel did to other processes meanwhile.
TEST(LocalFailure, RanksThatTheLauncherKillsHaveNotRunOutOfMemory) {
  const TempDir dir;
  const std::string counters = dir.file("vmstat");
  write_file_atomic(counters, "oom_kill 3\n");
  LocalJob job = child_job(2, {"0:write=" + counters + " oom_kill 4", "sleep=30"});
  job.kernel_counters = counters;
  job.limit_s = 1.0;
  const JobEnd end = Launcher().run(job);
  EXPECT_EQ(end.code, 128 + SIGALRM);
  ASSERT_EQ(end.exits.size(), 2u);
  for (const RankExit& exit : end.exits) {
    EXPECT_TRUE(exit.asked);
    EXPECT_FALSE(exit.starved);
  }
}

TEST(LocalFailure, ARankThatHeedsSigtermIsNotKilled) {
  LocalJob job = child_job(2, {"0:trap=TERM 75", "0:sleep=30", "1:sleep=0.1", "1:exit=6"});
  job.grace_s = 1.0;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 6);
  EXPECT_FALSE(says(outcome, "had to be killed")) << outcome.err;
}

/// As a scheduler suspends a job, or a container is frozen: whoever was to stop has its time afterwards.
TEST(LocalFailure, TimeInWhichAllWereSuspendedIsNoneOfTheGrace) {
  const TempDir dir;
  LocalJob job =
      child_job(2, {"0:trap=TERM 75", "pid-file=" + dir.file("rank-%r"), "0:sleep=30", "1:exit=6"});
  job.grace_s = 1.0;
  JobProcess process(job);
  const pid_t rank0 = wait_for_pid_file(dir.file("rank-0"));
  wait_for_pid_file(dir.file("rank-1"));
  std::this_thread::sleep_for(std::chrono::milliseconds(150));  // its end is seen
  for (const int number : {SIGSTOP, SIGCONT}) {
    process.signal(number);
    ::kill(rank0, number);
    if (number == SIGSTOP) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  }
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 6);
  EXPECT_FALSE(says(outcome, "had to be killed")) << outcome.err;
}

TEST(LocalFailure, AStubbornRankIsKilledAtTheEndOfTheGraceAndNamed) {
  LocalJob job = child_job(3, {"0:exit=0", "2:trap=TERM ignore", "2:sleep=30", "1:sleep=0.1", "1:exit=6"});
  job.grace_s = 0.6;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 6);
  EXPECT_TRUE(says(outcome, "stopping the other rank")) << outcome.err;
  EXPECT_TRUE(says(outcome, "rank 2 did not stop within 0.6 s and had to be killed")) << outcome.err;
  EXPECT_GT(outcome.seconds, 0.6);
  EXPECT_LT(outcome.seconds, 5.0);
}

TEST(LocalFailure, ARankThatHangsWhenTheOthersHaveEndedWellIsNamedAndKilled) {
  LocalJob job = child_job(2, {"beat=0.1", "0:stop="});
  job.silence_s = 0.6;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(says(outcome, "rank 0 (pid ")) << outcome.err;
  EXPECT_TRUE(says(outcome, "gave no sign of life for 1 s and was killed (it had been stopped by a signal)"))
      << outcome.err;
  EXPECT_FALSE(says(outcome, "rank 1")) << outcome.err;
}

TEST(LocalFailure, RanksThatAllHangAreNamedAndKilled) {
  LocalJob job = child_job(3, {"beat=0.1", "stop="});
  job.silence_s = 0.6;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(says(outcome, "gave no sign of life for 1 s")) << outcome.err;
  EXPECT_LT(outcome.seconds, 10.0);
}

/// A look of the launcher may fall between the last signs of life of two ranks, and hear of one a look
/// earlier.
TEST(LocalFailure, RanksThatHangAtOnceAreNamedTogether) {
  bool together = false;
  std::string err;
  for (int round = 0; round < 4 && !together; ++round) {
    const TempDir dir;
    const std::string begun = dir.file("begun-%r");
    LocalJob job = child_job(2, {"pid-file=" + begun, "await-files=" + begun, "beat=0.1", "stop="});
    job.silence_s = 0.6;
    const Outcome outcome = run(job);
    err = outcome.err;
    together = says(outcome, "ranks 0, 1 gave no sign of life for 1 s and are killed");
  }
  EXPECT_TRUE(together) << err;
}

TEST(LocalFailure, ARankThatGivesSignsOfLifeIsWaitedFor) {
  LocalJob job = child_job(2, {"0:beat=2", "1:exit=0"});
  job.silence_s = 0.6;
  EXPECT_EQ(run(job).code, 0);
  job.args = {"beat=0.1", "sleep=1.5"};
  job.silence_s = 0.0;
  EXPECT_EQ(run(job).code, 0) << "without a limit nobody is expected to give any";
}

/// One that loads its libraries cannot count yet; one that counts may hang in a loop.
TEST(LocalFailure, ProcessorTimeIsASignOfLifeUntilARankHasGivenTheFirstOfItsOwn) {
  LocalJob job = child_job(2, {"spin=2.5"});
  job.silence_s = 1.0;
  EXPECT_EQ(run(job).code, 0);
  job.args = {"0:beat=0.01", "0:spin=15"};
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 5);
  EXPECT_TRUE(says(outcome, "gave no sign of life for 1 s and was killed (it was computing)")) << outcome.err;
}

TEST(LocalFailure, AJobThatRunsLongerThanItsLimitIsKilled) {
  LocalJob job = child_job(2, {"beat=20"});
  job.limit_s = 0.5;
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 128 + SIGALRM);
  EXPECT_TRUE(says(outcome, "after its limit of 0.5 s and is killed")) << outcome.err;
  EXPECT_LT(outcome.seconds, 5.0);
  job.args = {"beat=0.1"};
  EXPECT_EQ(run(job).code, 0) << "this one ends before";
}

TEST(LocalFailure, AJobThatIsSuspendedAsAWholeGoesOn) {
  const TempDir dir;
  const std::string file = dir.file("rank-%r");
  LocalJob job = child_job(2, {"pid-file=" + file, "beat=2"});
  job.silence_s = 1.5;
  JobProcess process(job);
  std::vector<pid_t> ranks;
  for (const char* name : {"rank-0", "rank-1"}) ranks.push_back(wait_for_pid_file(dir.file(name)));
  process.signal(SIGSTOP);
  for (const pid_t rank : ranks) ::kill(rank, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(2));  // a suspension is time
  process.signal(SIGCONT);
  std::this_thread::sleep_for(
      std::chrono::milliseconds(100));  // a scheduler wakes one process after the other
  for (const pid_t rank : ranks) ::kill(rank, SIGCONT);
  EXPECT_EQ(process.wait().code, 0);
}

}  // namespace
}  // namespace trireme::launch
