// Where the words of ranks go: stdout, stderr, logs, terminals.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <pty.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>
#include <array>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>

#include "tests/launch/job_process.h"
#include "trireme/base/file.h"
#include "trireme/launch/pipe.h"

namespace trireme::launch {
namespace {

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines = lines_of(text);
  std::ranges::sort(lines);
  return lines;
}

TEST(LocalOutput, StdoutOfRankZeroIsUntouchedWithAndWithoutLogs) {
  const TempDir dir;
  const std::string bytes = "a\n\n10%\r20%\n" + std::string(200'000, 'x') + "no newline";
  // Arguments of a program are limited to 128 KiB each.
  LocalJob job =
      child_job(2, {"0:raw-out=" + bytes.substr(0, 100'000), "0:raw-out=" + bytes.substr(100'000, 100'000),
                    "0:raw-out=" + bytes.substr(200'000)});
  EXPECT_EQ(run(job).out, bytes);
  job.log_dir = dir.path();
  const Outcome logged = run(job);
  EXPECT_EQ(logged.out, bytes);
  EXPECT_EQ(logged.err, "");
  EXPECT_EQ(read_file(dir.file("rank-0.log")), bytes + "\n");
}

TEST(LocalOutput, EverythingElseGoesToStderrWithItsRank) {
  const Outcome outcome = run(child_job(
      3, {"0:out=result", "0:err=note of 0", "1:out=words of 1", "2:err=note of 2", "2:raw-err=cut"}));
  EXPECT_EQ(outcome.out, "result\n");
  EXPECT_EQ(sorted_lines(outcome.err),
            (std::vector<std::string>{"[r1] words of 1", "[r2] cut", "[r2] note of 2", "note of 0"}));
}

TEST(LocalOutput, WhatRankZeroAnnouncesStandsBeforeItsResults) {
  const TempDir dir;
  LocalJob job = child_job(2, {"0:err=model", "0:out=step 1", "0:err=later", "1:exit=0"});
  job.log_dir = dir.path();
  std::array<int, 2> both;
  ASSERT_EQ(::pipe(both.data()), 0);
  JobProcess process(job, both[1], both[1]);
  ::close(both[1]);
  std::string text;
  for (char c = 0; ::read(both[0], &c, 1) == 1;) text += c;
  ::close(both[0]);
  EXPECT_EQ(process.wait().code, 0);
  EXPECT_LT(text.find("model"), text.find("step 1")) << text;
}

TEST(LocalOutput, ALineOfSeveralRanksIsShownOnce) {
  const TempDir dir;  // the ranks meet first: on a busy machine they may start far apart
  const std::string file = dir.file("rank-%r");
  const Outcome outcome =
      run(child_job(4, {"pid-file=" + file, "await-files=" + file, "err=careful", "!0:err=only we three"}));
  EXPECT_EQ(lines_of(outcome.err),
            (std::vector<std::string>{"careful (x4 ranks)", "[r1] only we three (x3 ranks)"}));
}

TEST(LocalOutput, LogsHoldAllLinesOfARankAsItWroteThem) {
  const TempDir dir;
  LocalJob job = child_job(2, {"out=one", "err=two", "raw-err=10%\r50%\r100%\n", "1:raw-err=last"});
  job.log_dir = dir.file("made/on/demand");
  EXPECT_EQ(run(job).code, 0);
  // Two streams have no common order, so lines are compared as sets.
  EXPECT_EQ(sorted_lines(read_file(job.log_dir + "/rank-0.log")),
            (std::vector<std::string>{"100%", "one", "two"}));
  EXPECT_EQ(sorted_lines(read_file(job.log_dir + "/rank-1.log")),
            (std::vector<std::string>{"100%", "last", "one", "two"}));
}

TEST(LocalOutput, AFullDiskEndsTheLogAndNotTheJob) {
  const TempDir dir;
  std::filesystem::create_symlink("/dev/full", dir.file("rank-1.log"));
  LocalJob job = child_job(2, {"1:err=one", "1:err=two", "1:sleep=0.1", "1:err=three", "0:out=fine"});
  job.log_dir = dir.path();
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, "fine\n");
  const std::vector<std::string> lines = lines_of(outcome.err);
  const auto warns = [&](const std::string& line) { return line.find("rank-1.log") != std::string::npos; };
  EXPECT_EQ(std::ranges::count_if(lines, warns), 1) << outcome.err;
  EXPECT_NE(outcome.err.find("No space left"), std::string::npos);
  for (const char* line : {"[r1] one", "[r1] two", "[r1] three"})
    EXPECT_EQ(std::ranges::count(lines, line), 1);
  EXPECT_EQ(read_file(dir.file("rank-0.log")), "fine\n");
}

TEST(LocalOutput, AFullDiskBehindStdoutLetsTheJobFinishAndFailsIt) {
  const TempDir dir;
  const Descriptor full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  LocalJob job = child_job(1, {"out=one", "sleep=0.1", "out=two", "err=finished"});
  job.log_dir = dir.path();
  const Outcome outcome = JobProcess(job, full.get()).wait();
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_EQ(read_file(dir.file("rank-0.log")).size(), std::string("one\ntwo\nfinished\n").size());
  const size_t warning = outcome.err.find("cannot write to standard output");
  EXPECT_NE(warning, std::string::npos) << outcome.err;
  EXPECT_EQ(outcome.err.find("cannot write to", warning + 1), std::string::npos) << outcome.err;
  job.args.emplace_back("exit=7");
  EXPECT_EQ(JobProcess(job, full.get()).wait().code, 7) << "a rank's own failure says more";
}

TEST(LocalOutput, AReaderWhoLeavesStopsRankZeroAsInAnyPipe) {
  const TempDir dir;
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  ::close(ends[0]);
  const Descriptor write_end(ends[1]);
  LocalJob job =
      child_job(1, {"out=one", "sleep=0.2", "out=two", "sleep=0.2", "out=three", "sleep=0.2", "out=four"});
  job.log_dir = dir.path();
  EXPECT_EQ(JobProcess(job, write_end.get()).wait().code, 128 + SIGPIPE);
}

TEST(LocalOutput, AReaderWhoStallsDoesNotKeepUsFromStopping) {
  const TempDir dir;
  Pipe stalled = make_pipe();
  const LocalJob job = child_job(2, {"pid-file=" + dir.file("rank-%r"), "flood=2000000"});
  JobProcess process(job, -1, stalled.write.get());
  stalled.write.close();
  wait_for_pid_file(dir.file("rank-1"));
  ::usleep(200'000);  // until every buffer on the way is full
  // Again and again, as a user does: of two that come before the launcher runs the kernel keeps one.
  for (int press = 0; press < 50 && !ends_within(process.pid(), 0.3); ++press) process.signal(SIGINT);
  EXPECT_EQ(process.wait().code, 130);
}

TEST(LocalOutput, NothingIsLostWhenTheReaderIsSlow) {
  Pipe slow = make_pipe();
  const LocalJob job = child_job(1, {"flood=2000000"});
  JobProcess process(job, -1, slow.write.get());
  slow.write.close();
  ::usleep(200'000);
  EXPECT_EQ(bytes_until_end(slow.read), 2'000'000U);
  EXPECT_EQ(process.wait().code, 0);
}

TEST(LocalOutput, NobodyReadsWhatAnEndedRankHasLeftRunning) {
  const TempDir dir;
  const std::string hears = dir.file("hears-%r");
  // Rank 0 goes on until the daemon of rank 1 has been told.
  EXPECT_EQ(
      run(child_job(2, {"0:pid-file=" + hears, "0:await-files=" + hears, "1:daemon=" + hears, "1:sleep=0.3"}))
          .code,
      0);
}

TEST(LocalOutput, ARankThatClosesItsStreamsIsWaitedForAtRest) {
  const auto processor_s = [] {
    rusage usage{};
    ::getrusage(RUSAGE_CHILDREN, &usage);
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
  };
  const double before = processor_s();
  EXPECT_EQ(run(child_job(2, {"close=1", "close=2", "sleep=2"})).code, 0);
  EXPECT_LT(processor_s() - before, 0.5);
}

/// What a terminal of 100 columns shows of the job. Its driver turns "\n" into "\r\n". `meanwhile` is called
/// with its other end once the job runs.
std::string on_terminal(const LocalJob& job, const std::function<void(int)>& meanwhile = {}) {
  int master = -1, slave = -1;
  const winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
  EXPECT_EQ(::openpty(&master, &slave, nullptr, nullptr, &size), 0);
  const Descriptor screen(master);
  Descriptor line(slave);
  JobProcess process(job, -1, line.get());
  line.close();
  if (meanwhile) meanwhile(screen.get());
  std::string shown;
  char buffer[4096];
  for (ssize_t count; (count = ::read(screen.get(), buffer, sizeof buffer)) > 0;) {
    shown.append(buffer, static_cast<size_t>(count));
  }
  process.wait();
  return shown;
}

TEST(LocalOutput, ATerminalGetsTheBarOfRankZeroAsItIsDrawn) {
  const TempDir dir;
  LocalJob job = child_job(1, {"raw-err=\r10%", "sleep=0.05", "raw-err=\r20%", "raw-err=\r100%\n"});
  job.log_dir = dir.path();
  EXPECT_EQ(on_terminal(job), "\r10%\r20%\r100%\r\n");
  EXPECT_EQ(read_file(dir.file("rank-0.log")), "100%\n");
}

TEST(LocalOutput, ALineOfAnotherRankClearsTheBarAndSparesOtherText) {
  EXPECT_EQ(on_terminal(child_job(2, {"0:raw-err=\r10%", "0:sleep=0.6", "1:sleep=0.1", "1:err=hello"})),
            "\r10%\r\x1b[K[r1] hello\r\n");
  EXPECT_EQ(on_terminal(child_job(2, {"0:raw-err=thinking", "0:sleep=0.6", "1:sleep=0.1", "1:err=hello"})),
            "thinking\r\n[r1] hello\r\n");
}

TEST(LocalOutput, TextBehindABarThatWasClearedIsNoBar) {
  EXPECT_EQ(on_terminal(child_job(2, {"0:raw-err=\r10%", "0:sleep=0.8", "0:raw-err=thinking", "0:sleep=0.8",
                                      "1:sleep=0.2", "1:err=hello", "1:sleep=0.8", "1:err=again"})),
            "\r10%\r\x1b[K[r1] hello\r\nthinking\r\n[r1] again\r\n");
}

TEST(LocalOutput, AnOpenLineIsEndedBeforeTheLauncherSpeaks) {
  LocalJob job = child_job(2, {"0:trap=TERM ignore", "0:sleep=0.5", "0:raw-err=still here", "1:sleep=0.2",
                               "1:exit=3", "sleep=30"});
  job.grace_s = 1.0;
  const std::string shown = on_terminal(job);
  EXPECT_NE(shown.find("still here\r\n"), std::string::npos) << shown;
  EXPECT_NE(shown.find("rank 0 did not stop"), std::string::npos) << shown;
  job = child_job(1, {"raw-err=and here", "sleep=30"});
  job.limit_s = 1.0;
  EXPECT_TRUE(on_terminal(job).starts_with("and here\r\n"));
}

TEST(LocalOutput, RankZeroAloneSeesTheTerminalAndItsWidthAsItIsNow) {
  const TempDir dir;
  const std::string columns = "columns=TRIREME_TTY_FD";
  LocalJob job = child_job(2, {columns, "pid-file=" + dir.file("before-%r"),
                               "await-files=" + dir.file("after-%r"), columns, "env=TRIREME_OUT_TTY_FD"});
  job.log_dir = dir.path();
  on_terminal(job, [&](int screen) {
    for (const char* rank : {"0", "1"}) wait_for_pid_file(dir.file(std::string("before-") + rank));
    const winsize narrow{.ws_row = 24, .ws_col = 60, .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(::ioctl(screen, TIOCSWINSZ, &narrow), 0);
    for (const char* rank : {"0", "1"}) write_file_atomic(dir.file(std::string("after-") + rank), "");
  });
  EXPECT_EQ(read_file(dir.file("rank-0.log")),
            "TRIREME_TTY_FD: 100\nTRIREME_TTY_FD: 60\nTRIREME_OUT_TTY_FD=(unset)\n")
      << "stdout is a file";
  EXPECT_EQ(read_file(dir.file("rank-1.log")),
            "TRIREME_TTY_FD: none\nTRIREME_TTY_FD: none\nTRIREME_OUT_TTY_FD=(unset)\n");
  EXPECT_EQ(run(child_job(1, {columns})).out, "TRIREME_TTY_FD: none\n");
}

TEST(LocalOutput, NoEscapeSequenceReachesALogFile) {
  const TempDir dir;
  LocalJob job = child_job(
      2, {"0:raw-err=\r10%\x1b[K\r", "0:raw-err=\r\x1b[K12:00:00 warning: x\n", "0:out=\x1b[31mred\x1b[0m",
          "0:raw-err=\r\x1b[K", "1:out=\x1b]0;title\a\x1b[1;32mgreen\x1b[0m"});
  job.log_dir = dir.path();
  const std::string shown = on_terminal(job);
  EXPECT_NE(shown.find("\x1b[1;32mgreen"), std::string::npos) << "a terminal may have its colours";
  EXPECT_NE(shown.find("\x1b[K12:00:00"), std::string::npos);
  EXPECT_EQ(read_file(dir.file("rank-1.log")), "green\n");
  const std::string log = read_file(dir.file("rank-0.log"));
  EXPECT_EQ(log.find('\x1b'), std::string::npos) << log;
  for (const char* line : {"12:00:00 warning: x\n", "red\n"})
    EXPECT_NE(log.find(line), std::string::npos) << log;
  EXPECT_EQ(lines_of(log).size(), 2u) << "a bar that was wiped away is no line: " << log;
  EXPECT_EQ(run(job).err.find('\x1b'), std::string::npos) << "stderr is a file here";
}

}  // namespace
}  // namespace trireme::launch
