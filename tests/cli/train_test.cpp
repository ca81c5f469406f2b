// `train` with a script in the worker's place: what the front command hands over, and what it makes of the
// end.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/env.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

TEST(TrainRun, StartsTwoCpuRanksWithOneRequest) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Outcome outcome = front.run({"train", "--device=cpu", "--train.steps=3", "--name=tiny"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "verb train\n") << "stdout is rank 0's alone";
  EXPECT_EQ(read_file(front.file("request-0")), read_file(front.file("request-1")));
  EXPECT_FALSE(std::filesystem::exists(front.file("request-2")));

  const Request request = request_from_json(read_file(front.file("request-0")));
  EXPECT_EQ(request.verb, "train");
  EXPECT_EQ(request.command, "trireme train --device=cpu --train.steps=3 --name=tiny");
  EXPECT_TRUE(std::filesystem::equivalent(front.file(request.run_dir), front.file("runs/latest")));
  const auto config = plan::load({.path = "", .text = request.config, .overrides = {}}, Environment()).config;
  EXPECT_EQ(config.train.steps, 3);
  EXPECT_EQ(config.device, plan::Device::kCpu);
}

TEST(TrainRun, LeavesACompleteRunDirectory) {
  FrontProcess front;
  front.set_worker(recorder(0));
  ASSERT_EQ(front.run({"train", "-n", "3", "--train.global_batch=6", "--device=cpu"}).code, 0);
  const auto json = front.manifest();
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["mesh"], "dp_shard=3");
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["exit_code"], 0);
  EXPECT_TRUE(json["ended"].is_string());
  EXPECT_EQ(read_file(front.file("runs/latest/config.yaml")),
            request_from_json(read_file(front.file("request-0"))).config);
  for (const char* log : {"rank-0.log", "rank-1.log", "rank-2.log"}) {
    EXPECT_EQ(read_file(front.file("runs/latest/logs/") + log), "verb train\n") << log;
  }
}

TEST(TrainRun, ReturnsAndRecordsTheExitCodeOfItsRanks) {
  for (const int code : {1, 4, 5, 6, 7, 75}) {
    FrontProcess front;
    front.set_worker(recorder(code));
    EXPECT_EQ(front.run({"train", "--device=cpu", "-n", "1"}).code, code);
    EXPECT_EQ(front.manifest()["exit_code"], code);
  }
}

TEST(TrainRun, FindsItsFolderByOptionThenVariableThenDefault) {
  FrontProcess front;
  front.set_worker(recorder(0));
  front.run({"train", "--device=cpu", "-n", "1"});
  EXPECT_TRUE(std::filesystem::exists(front.file("runs/latest")));
  front.set("TRIREME_RUN_DIR", front.file("by-variable"));
  front.run({"train", "--device=cpu", "-n", "1"});
  EXPECT_TRUE(std::filesystem::exists(front.file("by-variable/latest")));
  front.run({"train", "--device=cpu", "-n", "1", "--run-dir", "by-option"});
  EXPECT_TRUE(std::filesystem::exists(front.file("by-option/latest")));
}

// The request holds the resolved config: a variable of lower precedence must not reach a worker and win
// there.
TEST(TrainRun, WorkersDoNotSeeConfigVariables) {
  FrontProcess front;
  front.set_worker(recorder(0));
  front.set("TRIREME__TRAIN__STEPS", "5");
  ASSERT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--train.steps=9"}).code, 0);
  EXPECT_FALSE(contains(read_file(front.file("env-0")), "TRIREME__TRAIN__STEPS"));
  EXPECT_TRUE(contains(request_from_json(read_file(front.file("request-0"))).config, "steps: 9"));
}

TEST(TrainRun, WithoutAWorkerSaysHowToGetOne) {
  const FrontProcess front;
  const Outcome outcome = front.run({"train", "--device=cpu"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.err, "trireme-worker")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs"))) << "a run that cannot start leaves nothing";
}

TEST(TrainRun, AFolderThatCannotBeMadeIsAnEnvironmentError) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("taken"), "x");
  const Outcome outcome = front.run({"train", "--device=cpu", "--run-dir=taken"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "taken")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

/// Everything on stderr, without the time at the start of each line.
std::vector<std::string> said(const Outcome& outcome) {
  std::vector<std::string> lines = split(outcome.err, '\n');
  for (std::string& line : lines) {
    if (line.size() > 9 && line[2] == ':' && line[5] == ':') line.erase(0, 9);
  }
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

TEST(TrainRun, SaysAtTheStartWhereTheRunIs) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Outcome outcome = front.run({"train", "--device=cpu", "-n", "1", "--name=tiny"});
  const std::string run = std::filesystem::read_symlink(front.file("runs/latest")).string();
  ASSERT_EQ(said(outcome).size(), 1u) << outcome.err;
  EXPECT_EQ(said(outcome)[0],
            "run     runs/" + run + ", weights at the end in checkpoints/final/model.safetensors");
  EXPECT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--quiet"}).err, "");
}

TEST(TrainRun, SaysWhereARunIsThatEndedWithoutASummary) {
  FrontProcess front;
  front.set_worker("exit 6");
  const Outcome failed = front.run({"train", "--device=cpu", "-n", "1", "--quiet"});
  const std::string run = "runs/" + std::filesystem::read_symlink(front.file("runs/latest")).string();
  EXPECT_EQ(said(failed).back(),
            "run     " + run + " ended with code 6 (NaN or infinity); its logs are in " + run + "/logs");
  front.set_worker("exit 130");
  const Outcome stopped = front.run({"train", "--device=cpu", "-n", "1", "--quiet"});
  EXPECT_TRUE(contains(stopped.err, "was stopped before it had saved any weights; 'trireme train runs/"))
      << stopped.err;
}

/// A program that reads the lines of JSON finds nothing else among them.
TEST(TrainRun, TheTableOfASummaryStaysOutOfTheJson) {
  FrontProcess front;
  front.set_worker("echo '{\"step\": 1}'\n" + leave_summary());
  const Words words = {"train", "--device=cpu", "-n", "1", "--summary", "--quiet"};
  const Outcome json = front.run(words + Words{"--json"});
  EXPECT_EQ(json.code, 0) << json.err;
  EXPECT_EQ(json.out, "{\"step\": 1}\n");
  EXPECT_TRUE(contains(json.err, "policy")) << json.err;
  const Outcome text = front.run(words);
  EXPECT_TRUE(contains(text.out, "policy")) << text.out;
  EXPECT_EQ(text.err, "");
}

struct BadPath {
  std::string path;
  std::string says;
};

TEST(TrainData, APathWithoutTextIsAConfigErrorBeforeAnythingStarts) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("empty.txt"), "");
  make_directories(front.file("folder"));
  const BadPath paths[] = {{"", "data.path is empty"},
                           {"nowhere.txt", front.file("nowhere.txt") + " does not exist"},
                           {"empty.txt", "has no text"},
                           {"folder", "has no text"},
                           {"/dev/null", "neither a file nor a folder"}};
  for (const BadPath& path : paths) {
    for (const char* dry : {"--quiet", "--dry-run"}) {
      const Outcome outcome =
          front.run({"train", "--device=cpu", "-n", "2", "--data.path=" + path.path, dry});
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      EXPECT_EQ(outcome.out, "");
      EXPECT_EQ(said(outcome).size(), 1u) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, path.says)) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, "set data.path to a text file")) << outcome.err;
    }
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
}

TEST(TrainData, ARelativePathIsKeptAsAnAbsoluteOne) {
  FrontProcess front;
  front.set_worker(recorder(0));
  write_file_atomic(front.file("text.txt"), "text");
  ASSERT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--data.path=./text.txt"}).code, 0);
  const auto config = plan::load({.path = front.file("runs/latest/config.yaml")}, Environment()).config;
  EXPECT_EQ(config.data.path, front.file("text.txt"));
}

TEST(TrainData, APathThatIsMeantFromTheConfigFileIsPointedOut) {
  FrontProcess front;
  make_directories(front.file("mine"));
  write_file_atomic(front.file("mine/text.txt"), "text");
  write_file_atomic(front.file("mine/run.yaml"), "data:\n  path: text.txt\n");
  const Outcome outcome = front.run({"train", "mine/run.yaml", "--device=cpu", "--dry-run"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "did you mean " + front.file("mine/text.txt"))) << outcome.err;
}

TEST(Train, ACacheThatCannotBeWrittenIsFoundBeforeAnyRankStarts) {
  FrontProcess front;
  front.set_worker(recorder(0));
  front.set("HOME", "/dev/null");  // no folder can be made in it, whoever tries
  const Outcome refused = front.run({"train", "--device=cpu"});
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_TRUE(contains(refused.err, "set XDG_CACHE_HOME")) << refused.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("request-0")));
  front.set("XDG_CACHE_HOME", front.file("cache"));
  EXPECT_EQ(front.run({"train", "--device=cpu"}).code, 0);
}

}  // namespace
}  // namespace trireme::cli
