// `train` with a script in the worker's place: what the front command hands over, and what it makes of the
// end.
#include <gtest/gtest.h>

#include "tests/cli/front_process.h"
#include "trireme/base/env.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

using Words = std::vector<std::string>;

/// A worker that leaves its request and its environment behind and ends with code `code`.
std::string recorder(int code) {
  return "printf %s \"$TRIREME_REQUEST\" > request-${RANK:-none}\n"
         "env > env-${RANK:-none}\n"
         "echo verb $1\n"
         "exit " +
         std::to_string(code);
}

nlohmann::json manifest(const FrontProcess& front) {
  return read_json(front.file("runs/latest/manifest.json"));
}

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
  const auto json = manifest(front);
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
    EXPECT_EQ(manifest(front)["exit_code"], code);
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

TEST(TrainJoin, ChecksTheBatchAgainstTheWorldItJoins) {
  FrontProcess front;
  front.set_worker(recorder(0));
  pretend_torchrun(front);
  EXPECT_EQ(front.run({"train", "--device=cpu", "--train.global_batch=7"}).code, 2);
  const Outcome clash = front.run({"train", "--device=cpu", "-n", "4"});
  EXPECT_EQ(clash.code, 2);
  EXPECT_TRUE(contains(clash.err, "-n 4")) << clash.err;
  EXPECT_TRUE(contains(clash.err, "torchrun")) << clash.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("request-1")));
}

TEST(TrainDryRun, PrintsThePlanAndStartsNothing) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words command = {"train",
                         "--dry-run",
                         "--device=cpu",
                         "-n",
                         "4",
                         "--model.preset=gpt2-124m",
                         "--data.tokenizer=byte",
                         "--train.global_batch=32",
                         "--train.micro_batch=2",
                         "--parallel.policy=zero2"};
  Words json_command = command;
  json_command.push_back("--json");
  const auto json = front.run(json_command).json();
  const int64_t params = 124439808;  // GPT-2 small as published
  EXPECT_EQ(json["params"], params);
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["batch"]["accumulation"], 4);  // 32 = 2 * 4 * 4
  EXPECT_EQ(json["state_bytes_per_rank"]["parameters"], 4 * params);
  // fp32, so no master beside the parameters; these layers leave no padding.
  EXPECT_EQ(json["state_bytes_per_rank"]["gradients"], 4 * (params / 4));
  EXPECT_EQ(json["state_bytes_per_rank"]["optimizer"], 8 * (params / 4));

  const Outcome text = front.run(command);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "124,439,808 parameters")) << text.out;
  EXPECT_TRUE(contains(text.out, "32 sequences = 2 micro-batch x 4 accumulation x 4 data-parallel ranks"))
      << text.out;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

}  // namespace
}  // namespace trireme::cli
