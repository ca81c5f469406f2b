// `train --resume` with its real worker: the config that a run goes on with, and who starts it again.
#include <fmt/format.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

/// Words for a run of one rank that saves after its last step.
Words saving(int steps) {
  return kTiny + Words{"-n", "1", "--checkpoint.every=100", fmt::format("--train.steps={}", steps)};
}

/// All files below `folder` but the logs of ranks, with what is in them.
std::map<std::string, std::string> contents(const std::string& folder) {
  namespace fs = std::filesystem;
  std::map<std::string, std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = fs::relative(entry.path(), folder);
    if (!name.starts_with("logs")) found[name] = entry.is_regular_file() ? read_file(entry.path()) : "";
  }
  return found;
}

TEST_F(Worker, AResumeThatIsRefusedLeavesTheRunByteForByte) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  const std::string run = std::filesystem::canonical(run_file(""));
  std::filesystem::create_directories(run + "/checkpoints/tmp-00000009-g1-a1");
  const auto before = contents(run);
  const Words resume = {"train", "-n", "1", "--resume=latest"};
  EXPECT_EQ(front_.run(resume + Words{"--model.n_layers=3", "--train.steps=4"}).code, 2);
  EXPECT_EQ(contents(run), before);
  const std::string step = run + "/checkpoints/step-00000002";
  EXPECT_EQ(front_.run({"train", "-n", "1", "--resume", step, "--train.steps=1"}).code, 2);
  EXPECT_EQ(contents(run), before);

  const std::string shard = step + "/shard-00000.safetensors";
  std::string bytes = read_file(shard);
  bytes.back() = static_cast<char>(bytes.back() + 1);
  write_file_atomic(shard, bytes);
  const auto damaged = contents(run);
  EXPECT_EQ(front_.run(resume + Words{"--train.steps=4", "--max-restarts=2"}).code, 7);
  EXPECT_EQ(contents(run), damaged);
}

TEST_F(Worker, ARunWithoutItsTensorboardFolderGoesOn) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  std::filesystem::remove_all(run_file("tensorboard"));
  const Outcome outcome = front_.run({"train", "-n", "1", "--resume=latest", "--train.steps=4"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(std::filesystem::is_empty(run_file("tensorboard")));
}

TEST_F(Worker, ARunThatWentBackAndDiedIsNotFoundInTheBranchThatItLeft) {
  const Words words = kTiny + Words{"-n", "1", "--checkpoint.keep=0", "--train.steps=8"};
  ASSERT_EQ(front_.run(words + Words{"--checkpoint.every=2"}).code, 0);
  const std::string step = run_file("checkpoints/step-00000002");
  EXPECT_EQ(front_
                .run({"train", "-n", "1", "--resume", step, "--optim.lr=1e30", "--train.grad_clip=0",
                      "--checkpoint.every=0"})
                .code,
            6);
  const Outcome list = front_.run({"ckpt", "list", "latest"});
  EXPECT_TRUE(contains(list.out, "step-00000008.undone")) << list.out;
  EXPECT_TRUE(contains(list.out, "complete, not read, set aside")) << list.out;
  EXPECT_EQ(front_.run({"ckpt", "verify", "latest"}).code, 0);
  const Outcome again = front_.run(words + Words{"--resume", "--checkpoint.every=2", "--optim.lr=1e-3"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_TRUE(contains(again.err, "after step 2 of")) << again.err;
  const auto made = steps();
  ASSERT_EQ(made.size(), 8u);
  for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i]["step"], i + 1);
}

TEST_F(Worker, ARunMayBeginWithTheWeightsOfOneByItsName) {
  ASSERT_EQ(front_.run(saving(2) + Words{"--name=first"}).code, 0);
  const std::string weights = std::filesystem::canonical(run_file("checkpoints/final/model.safetensors"));
  for (const char* word : {"first", "latest"}) {
    const Outcome outcome =
        front_.run(saving(1) + Words{"--name=second", std::string("--model.weights=") + word});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    if (word == std::string("first")) {
      EXPECT_TRUE(contains(outcome.err, "weights from " + weights)) << outcome.err;
    }
  }
}

TEST_F(Worker, ARunThatGoesOnKeepsTheConfigThatItGoesOnWith) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  const std::string first = read_file(run_file("config.yaml"));
  const std::string manifest = read_file(run_file("manifest.json"));
  const std::string summary = read_file(run_file("summary.json"));
  const Words resume = {"train", "-n", "1", "--resume=latest"};
  EXPECT_EQ(front_.run(resume + Words{"--model.n_layers=3", "--train.steps=4"}).code, 2);
  EXPECT_EQ(read_file(run_file("config.yaml")), first) << "its checkpoint refuses the other model";
  EXPECT_EQ(read_file(run_file("manifest.json")), manifest);
  EXPECT_EQ(read_file(run_file("summary.json")), summary);
  const Outcome outcome = front_.run(resume + Words{"--train.steps=4"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(steps().size(), 4u);
  const std::string second = read_file(run_file("config.yaml"));
  EXPECT_TRUE(contains(second, "  steps: 4 ")) << second;
  EXPECT_TRUE(contains(second, "# --train.steps\n")) << second;
  EXPECT_FALSE(contains(second, "config.yaml:"))
      << "what stayed came from where it came from before: " << second;
  EXPECT_EQ(read_file(run_file("config.attempt-1.yaml")), first);
}

TEST_F(Worker, ARunThatWasToGoOnIsPreemptedBeforeItsRanksHaveMet) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  lose_peers();
  auto joining = front_.start({"train", "--resume=latest", "--train.steps=4"});
  wait_until_it_joins();
  joining.signal(SIGTERM);
  EXPECT_EQ(joining.wait(60.0).code, 75);
}

/// torchrun kills what is left of an attempt and starts the same command again.
TEST_F(Worker, ARankThatAnotherLauncherStartsAgainGoesOnWithResume) {
  become_rank(0, 1, 0);
  front_.set("TORCHELASTIC_RESTART_COUNT", "0");
  const Words command = kTiny + Words{"--checkpoint.every=100", "--checkpoint.keep=0", "--resume=auto"};
  {
    auto training = front_.start(command + Words{"--train.steps=1000000"});
    wait_until([&] {
      return std::filesystem::exists(run_file("checkpoints/step-00000100/COMMIT.json")) &&
             steps().size() > 102;
    });
    training.signal(SIGKILL);
    EXPECT_EQ(training.wait(60.0).code, 128 + SIGKILL);
  }
  const auto last = static_cast<int64_t>(steps().size()) + 3;
  front_.set("TORCHELASTIC_RESTART_COUNT", "1");
  const Outcome again = front_.run(command + Words{fmt::format("--train.steps={}", last)});
  ASSERT_EQ(again.code, 0) << again.err;
  const auto records = steps();
  ASSERT_EQ(static_cast<int64_t>(records.size()), last);
  for (int64_t i = 0; i < last; ++i) EXPECT_EQ(records[static_cast<size_t>(i)]["step"], i + 1);
  const auto attempts = read_json(run_file("manifest.json"))["attempts"];
  ASSERT_EQ(attempts.size(), 2u) << attempts;
  EXPECT_TRUE(attempts[0]["exit_code"].is_null()) << "nobody was left to say it";
  EXPECT_GE(attempts[1]["resumed_from"], 100);
  EXPECT_EQ(attempts[1]["resumed_from"].get<int64_t>() % 100, 0);
  EXPECT_EQ(attempts[1]["steps_lost"], last - 3 - attempts[1]["resumed_from"].get<int64_t>());
}

}  // namespace
}  // namespace trireme::cli
