// Signals to the command and its real worker.
#include <fmt/format.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/clock.h"

namespace trireme::cli {
namespace {

TEST_F(Worker, CtrlCAndSigtermKeepTheWeights) {
  for (const auto& [number, name] : {std::pair(SIGINT, "SIGINT"), std::pair(SIGTERM, "SIGTERM"),
                                     std::pair(SIGUSR1, "SIGUSR1"), std::pair(SIGHUP, "SIGHUP")}) {
    auto training =
        front_.start(kTiny + Words{"--train.steps=1000000", "-n", "2", "--name", std::to_string(number)});
    wait_until([&] {
      return contains(std::filesystem::weakly_canonical(run_file("")).string(),
                      "/" + std::to_string(number) + "-") &&
             steps().size() >= 2;
    });
    training.signal(number);
    training.signal(number);  // the same request
    const double began = monotonic_seconds();
    const Outcome outcome = training.wait(60.0);
    EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "stopping after this step; again to abort now")) << outcome.err;
    const std::string run = "runs/" + std::filesystem::read_symlink(front_.file("runs/latest")).string();
    for (const std::string& part :
         {fmt::format("\ninterrupted by {} after step {} of 1000000, in ", name, steps().size()),
          "\nweights " + run + "/checkpoints/final/model.safetensors\n",
          "'trireme train " + run + "/config.yaml -n 2' trains again"})
      EXPECT_TRUE(contains(outcome.out, part)) << part << " in:\n" << outcome.out;
    EXPECT_LT(monotonic_seconds() - began, 10.0);
    EXPECT_EQ(read_json(run_file("manifest.json"))["exit_code"], 128 + number);
    EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
    EXPECT_EQ(read_json(run_file("summary.json"))["steps"], static_cast<int64_t>(steps().size()));
  }
}

/// A rank that another launcher started answers signals by itself.
TEST_F(Worker, ARankOfAnotherLauncherSaysThatItStopsAndTakesAPairOfSignalsForOne) {
  become_rank(0, 1, 0);
  auto training = front_.start(kTiny + Words{"--train.steps=1000000"});
  wait_until([&] { return std::filesystem::exists(front_.file("runs/latest")) && steps().size() >= 2; });
  training.signal(SIGINT);
  training.signal(SIGINT);
  const Outcome outcome = training.wait(60.0);
  EXPECT_EQ(outcome.code, 128 + SIGINT) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "stopping after this step; again to abort now\n")) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "interrupted by SIGINT after step ")) << outcome.out;
  EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
}

TEST_F(Worker, ASignalEndsTheWaitForOtherRanks) {
  lose_peers();
  auto joining = front_.start(kTiny);
  wait_until_it_joins();
  joining.signal(SIGTERM);
  const double began = monotonic_seconds();
  EXPECT_EQ(joining.wait(60.0).code, 128 + SIGTERM);
  EXPECT_LT(monotonic_seconds() - began, 3.0);
}

}  // namespace
}  // namespace trireme::cli
