// `launch` with a shell script as the user's program.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/cli/front_process.h"
#include "trireme/base/clock.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

/// A program beside the front command that runs `body`.
std::string program(const FrontProcess& front, const std::string& body) {
  const std::string path = front.file("mine");
  std::ofstream(path) << "#!/bin/sh\n" << body << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return "./mine";
}

TEST(Launch, GivesEveryRankItsPlaceAndTheProgramItsArguments) {
  FrontProcess front;
  const std::string mine = program(front, "echo \"$RANK of $WORLD_SIZE: $*\" > said-$RANK");
  const Outcome outcome =
      front.run({"launch", "-n", "3", mine, "--model.preset=x", "-n", "7", "--", "train", "--help"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_EQ(read_file(front.file(std::string("said-") + rank)),
              std::string(rank) + " of 3: --model.preset=x -n 7 -- train --help\n");
  }
}

TEST(Launch, ReturnsTheCodeOfTheRankThatFailed) {
  FrontProcess front;
  const std::string mine = program(front, "[ $RANK = 1 ] && exit 7; exec sleep 30");
  EXPECT_EQ(front.run({"launch", "-n", "2", "--", mine}).code, 7);
}

TEST(Launch, SaysThatASignalIsPassedOn) {
  FrontProcess front;
  const std::string mine =
      program(front, "trap 'exit 130' INT; touch up-$RANK; while :; do sleep 0.05; done");
  auto running = front.start({"launch", "-n", "2", mine});
  const double deadline = monotonic_seconds() + 20.0;
  while (!std::filesystem::exists(front.file("up-0")) || !std::filesystem::exists(front.file("up-1"))) {
    ASSERT_LT(monotonic_seconds(), deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  running.signal(SIGINT);
  const Outcome outcome = running.wait(20.0);
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "signal passed on to all ranks; send it again to kill them now\n"))
      << outcome.err;
}

TEST(Launch, WritesALogARank) {
  FrontProcess front;
  const std::string mine = program(front, "echo hello from $RANK");
  ASSERT_EQ(front.run({"launch", "-n", "2", "--log-dir", "logs", mine}).code, 0);
  EXPECT_EQ(read_file(front.file("logs/rank-1.log")), "hello from 1\n");
}

TEST(Launch, SaysWhatIsWrongWithTheCommandLine) {
  const FrontProcess front;
  const auto refused = [&](const std::vector<std::string>& words, const std::string& part) {
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2);
    EXPECT_TRUE(contains(outcome.err, part)) << outcome.err;
  };
  refused({"launch"}, "no program was given");
  refused({"launch", "--rank", "3", "./x"}, "unknown option '--rank'");
  refused({"launch", "-n", "2", "no-such-program"}, "'no-such-program' is not an executable program");
  refused({"launch", "-n", "0", "sh"}, "[cli.ranks] -n is 0, but must be 1 or more");
  refused({"launch", "-n", "99999999999999999999", "sh"}, "99999999999999999999 does not fit");
}

TEST(Launch, DoesNotExplainTheCodesOfOtherPrograms) {
  FrontProcess front;
  const Outcome outcome = front.run({"launch", "-n", "1", program(front, "exit 7")});
  EXPECT_EQ(outcome.code, 7);
  EXPECT_TRUE(contains(outcome.err, "exited with code 7\n")) << outcome.err;
}

TEST(Launch, HelpNamesTheProgram) {
  const Outcome help = FrontProcess().run({"launch", "--help"});
  EXPECT_TRUE(contains(help.out, "Usage: trireme launch [OPTIONS] PROGRAM [ARGUMENTS...]\n")) << help.out;
}

TEST(BenchMemory, SaysWhatItCannotRun) {
  FrontProcess front;
  front.set_worker("exit 5");
  EXPECT_EQ(front.run({"bench", "memory", "--policies=ddp,zero9", "--device=cpu"}).code, 2);
  EXPECT_FALSE(std::filesystem::exists(front.file("runs"))) << "nothing has run";
  const Outcome failed =
      front.run({"bench", "memory", "--policies=zero2", "--device=cpu", "--run-dir", "there"});
  EXPECT_EQ(failed.code, 5);
  EXPECT_TRUE(contains(failed.err, "zero2 ended with code 5; its logs are in there/")) << failed.err;
}

TEST(BenchMemory, NeedsASummaryToReport) {
  FrontProcess front;
  front.set_worker("exit 0");
  const Outcome outcome = front.run({"bench", "memory", "--policies=ddp", "--device=cpu"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_TRUE(contains(outcome.err, "summary.json")) << outcome.err;
}

}  // namespace
}  // namespace trireme::cli
