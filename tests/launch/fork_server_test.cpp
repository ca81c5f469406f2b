// Ranks that are forks of one process; test "launch_forked" runs all that jobs promise with such ranks.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "tests/launch/job_process.h"
#include "trireme/base/file.h"
#include "trireme/launch/child.h"
#include "trireme/launch/pipe.h"

namespace trireme::launch {
namespace {

/// The output of each rank.
std::vector<std::string> lines_by_rank(const LocalJob& job, const TempDir& dir) {
  std::vector<std::string> lines;
  for (int64_t rank = 0; rank < job.ranks; ++rank)
    lines.push_back(read_file(dir.file("rank-" + std::to_string(rank) + ".log")));
  return lines;
}

LocalJob forked_job(const TempDir& dir, int64_t ranks, std::vector<std::string> steps) {
  LocalJob job = child_job(ranks, std::move(steps));
  job.serves_forks = true;
  job.log_dir = dir.path();
  return job;
}

TEST(ForkServer, LoadsTheProgramOnceForAllRanks) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the sanitizer has a thread in every program, and such are not forked";
#endif
  const TempDir dir;
  LocalJob job = forked_job(dir, 5, {"loaded-by"});
  ASSERT_EQ(run(job).code, 0);
  std::vector<std::string> loaders = lines_by_rank(job, dir);
  EXPECT_EQ(std::set(loaders.begin(), loaders.end()).size(), 1u);
  job.serves_forks = false;
  ASSERT_EQ(run(job).code, 0);
  loaders = lines_by_rank(job, dir);
  EXPECT_EQ(std::set(loaders.begin(), loaders.end()).size(), 5u);
}

TEST(ForkServer, ItsForksAreChildrenOfTheLauncherWithThreadsOfTheirOwn) {
  const TempDir dir;
  const LocalJob job = forked_job(dir, 3, {"thread", "own-group", "stdin", "parent"});
  JobProcess process(job);
  const std::string launcher = std::to_string(process.pid());
  ASSERT_EQ(process.wait().code, 0);
  for (const std::string& lines : lines_by_rank(job, dir)) {
    EXPECT_EQ(lines, "threads work\nleads its group\nstdin is empty\n" + launcher + "\n");
  }
}

TEST(ForkServer, EnvironmentsOfAnySizeReachEveryRank) {
  const TempDir dir;
  LocalJob job = forked_job(dir, 2, {"env=RANK", "env=LARGE", "env=EMPTY"});
  const std::string large(100'000, 'x');
  job.environment.set("LARGE", large);
  for (int i = 0; i < 10; ++i) job.environment.set("MORE" + std::to_string(i), large);
  job.environment.set("EMPTY", "");
  ASSERT_EQ(run(job).code, 0);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(lines_by_rank(job, dir).at(static_cast<size_t>(rank)),
              "RANK=" + std::to_string(rank) + "\nLARGE=" + large + "\nEMPTY=\n");
  }
}

TEST(ForkServer, DescriptorsHaveTheirNumbersInEveryRank) {
  const TempDir dir;
  const LocalJob job = forked_job(dir, 2, {"env=TRIREME_FLIGHT_FD", "fds"});
  ASSERT_EQ(run(job).code, 0);
  const auto holds = [](const std::string& open, const std::string& variable) {
    return (open + " ").find(" " + variable.substr(variable.find('=') + 1) + " ") != std::string::npos;
  };
  for (const std::string& text : lines_by_rank(job, dir)) {
    const std::vector<std::string> lines = lines_of(text);
    EXPECT_TRUE(holds(lines.at(1), lines.at(0))) << text;
  }
}

TEST(ForkServer, AProgramWithThreadsIsLoadedByEachRank) {
  const TempDir dir;
  const LocalJob job = forked_job(dir, 3, {"thread-first", "loaded-by"});
  ASSERT_EQ(run(job).code, 0);
  const std::vector<std::string> loaders = lines_by_rank(job, dir);
  EXPECT_EQ(std::set(loaders.begin(), loaders.end()).size(), 3u);
}

/// It has loaded the program to be forked, and takes none of its steps.
TEST(ForkServer, TheServerItselfIsNoRankWhenNobodyAsksAnyMore) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  Descriptor ours(ends[0]), theirs(ends[1]);
  Pipe out = make_pipe();
  Child server({.program = TEST_CHILD,
                .args = {"out=I am a rank"},
                .environment = Environment({{"TRIREME_FORK_SERVER_FD", std::to_string(theirs.get())}}),
                .stdout_fd = out.write.get(),
                .keep_fds = {theirs.get()}});
  out.write.close();
  theirs.close();
  ours.close();
  EXPECT_EQ(bytes_until_end(out.read), 0u);
}

size_t children_of(pid_t parent) {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::string line;
    std::getline(std::ifstream(entry.path() / "stat"), line);
    char state = 0;
    pid_t of = 0;
    if (const size_t name_end = line.rfind(')'); name_end != std::string::npos)
      std::istringstream(line.substr(name_end + 1)) >> state >> of;
    count += of == parent ? 1 : 0;
  }
  return count;
}

/// It holds the memory of a program, which nobody needs any more.
TEST(ForkServer, IsGoneOnceAllRanksRun) {
  const TempDir dir;
  const JobProcess process(forked_job(dir, 2, {"pid-file=" + dir.file("pid-%r"), "sleep=60"}));
  for (const char* name : {"pid-0", "pid-1"}) wait_for_pid_file(dir.file(name));
  for (int look = 0; look < 1000 && children_of(process.pid()) != 2; ++look) ::usleep(5'000);
  EXPECT_EQ(children_of(process.pid()), 2u);
}

TEST(ForkServer, NothingIsServedOnceTheLauncherIsGone) {
  const TempDir dir;
  const LocalJob job = forked_job(dir, 2, {"pid-file=" + dir.file("pid-%r"), "sleep=60"});
  JobProcess process(job);
  const pid_t first = wait_for_pid_file(dir.file("pid-0")), second = wait_for_pid_file(dir.file("pid-1"));
  process.signal(SIGKILL);
  EXPECT_TRUE(ends_within(first, 5.0));
  EXPECT_TRUE(ends_within(second, 5.0));
}

}  // namespace
}  // namespace trireme::launch
