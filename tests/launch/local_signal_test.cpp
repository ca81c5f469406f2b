// Signals to the launcher, and that nothing outlives it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "tests/launch/job_process.h"
#include "trireme/base/file.h"
#include "trireme/launch/pipe.h"

namespace trireme::launch {
namespace {

/// Starts the job and waits until each rank has passed its step "pid-file".
class SignalTest : public ::testing::Test {
 protected:
  void SetUp() override { std::signal(SIGHUP, SIG_DFL); }  // the tests themselves may run under nohup

  LocalJob job_of(int64_t ranks, std::vector<std::string> before, std::vector<std::string> after) {
    before.push_back("pid-file=" + dir_.file("rank-%r"));
    before.insert(before.end(), after.begin(), after.end());
    return child_job(ranks, std::move(before));
  }
  std::vector<pid_t> wait_for_ranks(const LocalJob& job) const {
    std::vector<pid_t> pids;
    for (int64_t rank = 0; rank < job.ranks; ++rank) {
      pids.push_back(wait_for_pid_file(dir_.file("rank-" + std::to_string(rank))));
    }
    return pids;
  }
  Outcome after_signal(const LocalJob& job, int number) const {
    JobProcess process(job);
    wait_for_ranks(job);
    process.signal(number);
    return process.wait();
  }
  TempDir dir_;
};

using LocalSignal = SignalTest;

TEST_F(LocalSignal, InterruptIsForwardedAndItsCodeReturnedWithoutComplaint) {
  const Outcome outcome = after_signal(job_of(3, {"trap=INT 130"}, {"sleep=30"}), SIGINT);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(outcome.err, "");
}

TEST_F(LocalSignal, PreemptedRanksMakeAPreemptedJob) {
  const Outcome outcome = after_signal(job_of(3, {"trap=TERM 75"}, {"sleep=30"}), SIGTERM);
  EXPECT_EQ(outcome.code, 75);
  EXPECT_EQ(outcome.err, "");
}

/// A shell that a signal ends at once, and behind it a program that takes `first`, is up, and goes on to
/// `then`.
LocalJob behind_a_shell(const TempDir& dir, const std::string& first, const std::string& then) {
  const std::string up = dir.file("up");
  write_file_atomic(dir.file("program"),
                    first + "\necho $$ > " + up + ".tmp\n/bin/mv " + up + ".tmp " + up + "\n" + then + "\n");
  LocalJob job = child_job(1, {"-c", "/bin/sh " + dir.file("program") + "; true"});
  job.program = "/bin/sh";
  return job;
}

TEST_F(LocalSignal, WhatAShellHasStartedFinishesWhatItBegan) {
  const std::string done = dir_.file("done");
  JobProcess process(behind_a_shell(dir_, "trap '/bin/sleep 0.5; : > " + done + "; exit 0' TERM",
                                    "while :; do /bin/sleep 0.05; done"));
  wait_for_pid_file(dir_.file("up"));
  process.signal(SIGTERM);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 128 + SIGTERM);
  EXPECT_TRUE(std::filesystem::exists(done));
  EXPECT_EQ(outcome.err.find("had to be killed"), std::string::npos) << outcome.err;
}

/// The launcher asks it to stop as well when another rank has failed.
TEST_F(LocalSignal, WhatAShellHasStartedFinishesWhatItBeganWhenAnotherRankFails) {
  const std::string done = dir_.file("done");
  LocalJob job = behind_a_shell(dir_, "trap '/bin/sleep 0.5; : > " + done + "; exit 0' TERM",
                                "while :; do /bin/sleep 0.05; done");
  job.ranks = 2;
  job.serves_forks = false;  // a shell serves none
  job.grace_s = 6.0;
  job.args.back() = "if [ $RANK = 1 ]; then while ! [ -e " + dir_.file("up") +
                    " ]; do /bin/sleep 0.05; done; exit 6; fi; " + job.args.back();
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 6);
  EXPECT_TRUE(std::filesystem::exists(done));
  EXPECT_EQ(outcome.err.find("had to be killed"), std::string::npos) << outcome.err;
}

TEST_F(LocalSignal, WhatARankThatWasNotToldToStopLeavesBehindIsKilledWithIt) {
  LocalJob job = child_job(1, {"-c", "trap '' TERM; /bin/sleep 60 & exit 0"});
  job.program = "/bin/sh";
  EXPECT_EQ(run(job).code, 0) << "without waiting for it";
}

TEST_F(LocalSignal, WhatAShellHasStartedAndDoesNotStopIsKilled) {
  LocalJob job = behind_a_shell(dir_, "trap '' TERM", "exec /bin/sleep 30");
  job.stop_s = 0.5;
  JobProcess process(job);
  const pid_t program = wait_for_pid_file(dir_.file("up"));
  process.signal(SIGTERM);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 128 + SIGTERM);
  EXPECT_NE(outcome.err.find("rank 0 did not stop within 0.5 s of SIGTERM"), std::string::npos)
      << outcome.err;
  EXPECT_TRUE(ends_within(program, 1.0));
}

TEST_F(LocalSignal, ProgramsWithoutHandlersEndByTheSignal) {
  EXPECT_EQ(after_signal(job_of(2, {}, {"sleep=30"}), SIGTERM).code, 128 + SIGTERM);
}

TEST_F(LocalSignal, IsPassedOnAsItCame) {
  const auto code_of = [&](const std::vector<std::string>& before, int number) {
    for (const char* rank : {"rank-0", "rank-1"}) std::filesystem::remove(dir_.file(rank));
    const Outcome outcome = after_signal(job_of(2, before, {"sleep=30"}), number);
    EXPECT_EQ(outcome.err, "");
    return outcome.code;
  };
  EXPECT_EQ(code_of({"trap=HUP 75"}, SIGHUP), 75);
  EXPECT_EQ(code_of({"trap=USR1 75"}, SIGUSR1), 75);
  for (const int number : {SIGHUP, SIGUSR1})
    EXPECT_EQ(code_of({}, number), 128 + number) << "of programs without handlers";
}

TEST_F(LocalSignal, UnderNohupAHangupStopsNothing) {
  std::signal(SIGHUP, SIG_IGN);
  const LocalJob job = job_of(2, {}, {"sleep=0.3", "out=went on"});
  JobProcess process(job);
  wait_for_ranks(job);
  process.signal(SIGHUP);
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "went on\n");
}

TEST_F(LocalSignal, SigusrOneOfAProgramIsItsOwnAndStopsNothing) {
  LocalJob job = job_of(1, {"trap=USR1 say"}, {"await-files=" + dir_.file("done-%r")});
  job.usr1_stops = false;
  job.stop_s = 0.1;
  job.stop_notice = "stopping";
  JobProcess process(job);
  wait_for_ranks(job);
  for (int i = 0; i < 2; ++i) {
    process.signal(SIGUSR1);
    ::usleep(200'000);
  }
  write_file_atomic(dir_.file("done-0"), "");
  const Outcome outcome = process.wait();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "heard\nheard\n");
  EXPECT_EQ(outcome.err, "");
}

TEST_F(LocalSignal, RanksThatFinishAllTheSameMakeASuccess) {
  EXPECT_EQ(after_signal(job_of(2, {"trap=INT ignore"}, {"sleep=0.3"}), SIGINT).code, 0);
}

TEST_F(LocalSignal, APeerThatLostThemAfterwardsIsNoError) {
  const LocalJob job =
      job_of(2, {"0:trap=INT 130", "1:trap=INT ignore"}, {"0:sleep=30", "1:sleep=0.5", "1:exit=5"});
  const Outcome outcome = after_signal(job, SIGINT);
  EXPECT_EQ(outcome.code, 130);
  EXPECT_EQ(outcome.err, "");
}

TEST_F(LocalSignal, ARankThatCrashesWhileStoppingIsReported) {
  const LocalJob job = job_of(2, {"trap=INT ignore"}, {"0:sleep=30", "1:sleep=0.3", "1:kill=11"});
  LocalJob quick = job;
  quick.grace_s = 0.2;
  const Outcome outcome = after_signal(quick, SIGINT);
  EXPECT_EQ(outcome.code, 128 + SIGSEGV);
  EXPECT_NE(outcome.err.find("SIGSEGV"), std::string::npos);
}

TEST_F(LocalSignal, ASigtermThatARankIgnoresKillsItByItself) {
  LocalJob job = job_of(2, {"0:trap=TERM 75", "1:trap=TERM ignore"}, {"sleep=30"});
  job.stop_s = 0.5;
  const Outcome outcome = after_signal(job, SIGTERM);
  EXPECT_EQ(outcome.code, 128 + SIGTERM);
  EXPECT_NE(outcome.err.find("rank 1 did not stop within 0.5 s of SIGTERM and had to be killed"),
            std::string::npos)
      << outcome.err;
}

TEST_F(LocalSignal, AReaderThatStallsDoesNotKeepAJobThatWasToldToStop) {
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  LocalJob job = job_of(2, {"trap=TERM 75"}, {"flood=600000", "sleep=30"});
  job.stop_s = 0.5;
  JobProcess process(job, -1, pipe_ends[1]);  // nobody reads the other end
  wait_for_ranks(job);
  ::usleep(300'000);
  process.signal(SIGTERM);
  EXPECT_NE(process.wait().code, 0);
  ::close(pipe_ends[0]);
  ::close(pipe_ends[1]);
}

TEST_F(LocalSignal, AReaderThatIsSlowGetsAllOfAJobThatWasToldToStop) {
  Pipe slow = make_pipe();
  // Less than all buffers on the way hold, and more than the pipe.
  const LocalJob job = job_of(1, {"trap=TERM 75", "flood=300000"}, {"sleep=30"});
  JobProcess process(job, -1, slow.write.get());
  slow.write.close();
  wait_for_ranks(job);
  process.signal(SIGTERM);
  ::usleep(500'000);
  EXPECT_GE(bytes_until_end(slow.read), 300'000U);
  EXPECT_EQ(process.wait().code, 75);
}

TEST_F(LocalSignal, ASecondInterruptKills) {
  const LocalJob job = job_of(2, {"trap=INT ignore"}, {"sleep=30"});
  JobProcess process(job);
  const std::vector<pid_t> ranks = wait_for_ranks(job);
  process.signal(SIGINT);
  ::usleep(1'100'000);
  for (pid_t pid : ranks) EXPECT_FALSE(ends_within(pid, 0.0)) << "the first one lets ranks finish";
  process.signal(SIGINT);
  EXPECT_EQ(process.wait().code, 130);
  for (pid_t pid : ranks) EXPECT_TRUE(ends_within(pid, 1.0));
}

TEST_F(LocalSignal, ASecondSignalWithinASecondIsTheSameRequest) {
  for (const int number : {SIGINT, SIGTERM}) {
    LocalJob job = job_of(2, {"trap=INT ignore", "trap=TERM ignore"}, {"sleep=0.6"});
    job.stop_notice = "stopping after this step; again to abort now";
    JobProcess process(job);
    wait_for_ranks(job);
    process.signal(number);
    ::usleep(100'000);
    process.signal(SIGINT);
    const Outcome outcome = process.wait();
    EXPECT_EQ(outcome.code, 0) << "the ranks have finished";
    EXPECT_EQ(outcome.err.find("again to abort now"), outcome.err.rfind("again to abort now")) << outcome.err;
    EXPECT_NE(outcome.err.find(" stopping after this step; again to abort now\n"), std::string::npos)
        << outcome.err;
    for (const char* rank : {"rank-0", "rank-1"}) std::filesystem::remove(dir_.file(rank));
  }
}

TEST_F(LocalSignal, RanksDieWithAKilledLauncher) {
  const LocalJob job = job_of(4, {"trap=TERM ignore", "trap=INT ignore"}, {"sleep=30"});
  JobProcess process(job);
  const std::vector<pid_t> ranks = wait_for_ranks(job);
  process.signal(SIGKILL);
  EXPECT_EQ(process.wait().code, 128 + SIGKILL);
  for (pid_t pid : ranks) EXPECT_TRUE(ends_within(pid, 2.0)) << pid;
}

TEST_F(LocalSignal, HelpersOfARankDieWithIt) {
  const Outcome outcome = run(job_of(1, {"helper=" + dir_.file("helper")}, {"sleep=0.3"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(ends_within(wait_for_pid_file(dir_.file("helper")), 1.0));
}

TEST_F(LocalSignal, RanksKeepTheirSignalsEvenIfOurParentIgnoredThem) {
  const auto old = std::signal(SIGINT, SIG_IGN);
  const auto old_child = std::signal(SIGCHLD, SIG_IGN);
  const LocalJob job = job_of(2, {}, {"sleep=30"});
  JobProcess process(job);
  std::signal(SIGCHLD, old_child);
  std::signal(SIGINT, old);
  wait_for_ranks(job);
  process.signal(SIGINT);
  EXPECT_EQ(process.wait().code, 128 + SIGINT);
}

}  // namespace
}  // namespace trireme::launch
