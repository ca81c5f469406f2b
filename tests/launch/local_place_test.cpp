// What ranks find when they start: variables, descriptors, process groups, the rendezvous socket.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/launch/job_process.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"

namespace trireme::launch {
namespace {

TEST(LocalJob, ReturnsZeroWhenAllRanksDo) {
  const Outcome outcome = run(child_job(3, {}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out + outcome.err, "");
}

TEST(LocalJob, EachRankKnowsItsPlace) {
  const TempDir dir;
  LocalJob job = child_job(3, {"env=RANK", "env=LOCAL_RANK", "env=WORLD_SIZE", "env=LOCAL_WORLD_SIZE",
                               "env=MASTER_ADDR", "env=TRIREME_LAUNCHER", "env=MASTER_PORT", "env=MINE"});
  job.environment.set("MINE", "a b=c");
  job.log_dir = dir.path();
  EXPECT_EQ(run(job).code, 0);
  std::set<std::string> ports;
  for (int rank = 0; rank < 3; ++rank) {
    const std::string r = std::to_string(rank);
    std::vector<std::string> lines = lines_of(read_file(dir.file("rank-" + r + ".log")));
    ASSERT_EQ(lines.size(), 8U);
    ports.insert(lines[6]);
    lines.erase(lines.begin() + 6);
    EXPECT_EQ(lines,
              (std::vector<std::string>{"RANK=" + r, "LOCAL_RANK=" + r, "WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3",
                                        "MASTER_ADDR=127.0.0.1", "TRIREME_LAUNCHER=trireme", "MINE=a b=c"}));
  }
  EXPECT_EQ(ports.size(), 1U);
  EXPECT_FALSE(ports.contains("MASTER_PORT=(unset)"));
}

TEST(LocalJob, RanksShareAKeyThatNoOtherJobHas) {
  std::set<std::string> keys;
  for (int job_number = 0; job_number < 3; ++job_number) {
    const TempDir dir;
    LocalJob job = child_job(2, {"env=TRIREME_JOB_KEY"});
    job.log_dir = dir.path();
    EXPECT_EQ(run(job).code, 0);
    const std::string key = read_file(dir.file("rank-0.log"));
    EXPECT_EQ(read_file(dir.file("rank-1.log")), key);
    EXPECT_EQ(key.size(), std::string("TRIREME_JOB_KEY=\n").size() + 32);
    keys.insert(key);
  }
  EXPECT_EQ(keys.size(), 3u);
}

std::vector<std::string> sorted_words(const std::string& text) {
  std::vector<std::string> words = split(text, ' ');
  std::ranges::sort(words);
  return words;
}

/// What whoever runs this test has left open for all programs below it.
std::string open_for_everyone() {
  std::string fds;
  for (int fd = 3; fd < 256; ++fd) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0) fds.append(" ").append(std::to_string(fd));
  }
  return fds;
}

TEST(LocalJob, RanksInheritTheFlightRecordAndRankZeroTheListeningSocket) {
  const TempDir dir;
  LocalJob job = child_job(3, {"env=TRIREME_LISTEN_FD", "env=TRIREME_FLIGHT_FD", "fds"});
  job.log_dir = dir.path();
  ASSERT_EQ(run(job).code, 0);
  const auto value = [](const std::string& line) { return line.substr(line.find('=') + 1); };
  const std::vector<std::string> zero = lines_of(read_file(dir.file("rank-0.log")));
  const std::string record = value(zero.at(1));
  EXPECT_EQ(sorted_words(zero.at(2)),
            sorted_words("open: " + value(zero.at(0)) + " " + record + open_for_everyone()));
  for (const char* log : {"rank-1.log", "rank-2.log"}) {
    const std::vector<std::string> lines = lines_of(read_file(dir.file(log)));
    EXPECT_EQ(value(lines.at(0)), "(unset)");
    EXPECT_EQ(value(lines.at(1)), record) << "one for all";
    EXPECT_EQ(sorted_words(lines.at(2)), sorted_words("open: " + record + open_for_everyone()));
  }
}

TEST(LocalJob, RankZeroServesTheSocketThatTheOthersDialOnLoopback) {
  // The connection is made long before rank 0 accepts it: the socket listens from the start.
  const Outcome outcome =
      run(child_job(2, {"0:env=MASTER_PORT", "0:sleep=0.2", "0:serve", "1:dial=hello from 1"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<std::string> lines = lines_of(outcome.out);
  ASSERT_EQ(lines.size(), 3U);
  const std::string port = lines[0].substr(std::string("MASTER_PORT=").size());
  EXPECT_EQ(lines[1], "listening on 127.0.0.1:" + port);
  EXPECT_EQ(lines[2], "hello from 1");
}

TEST(LocalJob, NobodyAnswersThePortOnceRankZeroIsGone) {
  const Outcome outcome = run(child_job(2, {"0:exit=0", "1:sleep=0.5", "1:dial=hello"}));
  EXPECT_EQ(outcome.code, 91) << "the dialling rank must be refused";
}

TEST(LocalJob, RanksLeadTheirOwnGroupsAndReadNothing) {
  const Outcome outcome = run(child_job(1, {"own-group", "stdin"}));
  EXPECT_EQ(outcome.out, "leads its group\nstdin is empty\n");
}

TEST(LocalJob, SharesTheCoresAmongTheRanksUnlessTold) {
  EXPECT_EQ(run(child_job(100, {"!0:exit=0", "env=OMP_NUM_THREADS"})).out, "OMP_NUM_THREADS=1\n")
      << "holds on a machine with less than 200 cores";
  LocalJob told = child_job(1, {"env=OMP_NUM_THREADS"});
  told.environment.set("OMP_NUM_THREADS", "13");
  EXPECT_EQ(run(told).out, "OMP_NUM_THREADS=13\n");
}

TEST(LocalJob, RunsAHundredRanks) {
  const TempDir dir;
  LocalJob job = child_job(100, {"env=RANK", "err=done"});
  job.log_dir = dir.path();
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (int rank = 0; rank < 100; ++rank) {
    const std::string r = std::to_string(rank);
    const std::string log = read_file(dir.file("rank-" + r + ".log"));
    EXPECT_TRUE(log == "RANK=" + r + "\ndone\n" || log == "done\nRANK=" + r + "\n")
        << log << "two pipes do not say which was written first";
  }
}

TEST(LocalJob, RefusesAProgramThatCannotRun) {
  LocalJob job = child_job(2, {});
  job.program = "/nowhere/worker";
  const Outcome outcome = run(job);
  EXPECT_EQ(outcome.code, static_cast<int>(ExitCode::kEnvironment));
  EXPECT_NE(outcome.err.find("cannot run /nowhere/worker: No such file"), std::string::npos) << outcome.err;
}

TEST(LocalJob, RefusesImpossibleNumbers) {
  EXPECT_THROW(run_local(child_job(0, {})), ConfigError);
  for (double LocalJob::*const time :
       {&LocalJob::grace_s, &LocalJob::stop_s, &LocalJob::silence_s, &LocalJob::limit_s}) {
    LocalJob job = child_job(1, {});
    job.*time = 0.0;
    EXPECT_EQ(run(job).code, 0);
    for (const double none : {-1.0, std::nan("")}) {
      job.*time = none;
      EXPECT_THROW(run_local(job), ConfigError);
    }
  }
}

TEST(LocalJob, RefusesALogDirThatCannotBe) {
  LocalJob job = child_job(1, {});
  job.log_dir = "/dev/null/logs";
  EXPECT_THROW(run_local(job), EnvironmentError);
}

}  // namespace
}  // namespace trireme::launch
