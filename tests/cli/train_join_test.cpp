// `train` as one rank of a launcher such as torchrun.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/file.h"
#include "trireme/cli/request.h"

namespace trireme::cli {
namespace {

/// A front command that torchrun started as rank 1 of 2.
void pretend_torchrun(FrontProcess& front) {
  const std::pair<const char*, const char*> variables[] = {{"RANK", "1"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "1"},
                                                           {"LOCAL_WORLD_SIZE", "2"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : variables) front.set(name, value);
}

TEST(TrainJoin, BecomesTheRankThatALauncherAskedFor) {
  FrontProcess front;
  front.set_worker(recorder(6));
  pretend_torchrun(front);
  const Outcome outcome = front.run({"train", "--device=cpu"});
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  const Request request = request_from_json(read_file(front.file("request-1")));
  EXPECT_EQ(request.run_dir, "") << "rank 0 makes it";
  EXPECT_EQ(request.runs_root, "runs");
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("request-0"))) << "no ranks of its own";
}

TEST(TrainJoin, FiveVariablesByHandAreEnough) {
  FrontProcess front;
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"}};
  for (const auto& [name, value] : variables) front.set(name, value);
  const Outcome outcome = front.run({"train", "--device=cpu", "--dry-run"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "per rank x 1 on ")) << outcome.out;
}

TEST(TrainJoin, ChecksTheBatchAgainstTheWorldItJoins) {
  FrontProcess front;
  front.set_worker(recorder(0));
  pretend_torchrun(front);
  front.set("LOCAL_RANK", "0");  // the first of its host
  EXPECT_EQ(front.run({"train", "--device=cpu", "--train.global_batch=7"}).code, 2);
  const Outcome clash = front.run({"train", "--device=cpu", "-n", "4"});
  EXPECT_EQ(clash.code, 2);
  EXPECT_TRUE(contains(clash.err, "-n 4")) << clash.err;
  EXPECT_TRUE(contains(clash.err, "torchrun")) << clash.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("request-1")));
}

TEST(TrainJoin, DoesNotNameALauncherThatItDoesNotKnow) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"}};
  for (const auto& [name, value] : variables) front.set(name, value);
  const Outcome clash = front.run({"train", "--device=cpu", "-n", "4"});
  EXPECT_EQ(clash.code, 2);
  EXPECT_TRUE(contains(clash.err, "whoever set RANK and WORLD_SIZE")) << clash.err;
  EXPECT_FALSE(contains(clash.err, "torchrun")) << clash.err;
}

TEST(TrainJoin, TheFirstRankOfAHostSpeaksForAll) {
  FrontProcess front;
  front.set_worker(recorder(0));
  pretend_torchrun(front);
  const std::vector<std::string> command = {"train", "--device=cpu", "--data.path=nowhere.txt"};
  const Outcome second = front.run(command);
  EXPECT_EQ(second.code, 2);
  EXPECT_EQ(second.err, "");
  front.set("RANK", "0");
  front.set("LOCAL_RANK", "0");
  const Outcome first = front.run(command);
  EXPECT_EQ(first.code, 2);
  EXPECT_TRUE(contains(first.err, "nowhere.txt")) << first.err;
}

}  // namespace
}  // namespace trireme::cli
