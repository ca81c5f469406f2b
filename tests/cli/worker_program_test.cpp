// A program of one's own that calls train_main(): examples/own_data, beside the installed command.
#include <csignal>
#include <filesystem>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

class OwnProgram : public Worker {
 protected:
  OwnProgram() { front_.set("TRIREME_COMMAND", front_.file("bin/trireme")); }

  /// The program with its config and `more` words.
  Outcome run_own(const Words& more) {
    front_.run_instead(TRIREME_OWN_DATA);
    const Outcome outcome = front_.run(kConfig + more);
    front_.run_instead("");
    return outcome;
  }

  nlohmann::json summary() const { return nlohmann::json::parse(read_file(run_file("summary.json"))); }

  const Words kConfig = {std::string(TRIREME_SOURCE) + "/examples/own_data/config.yaml", "--device=cpu"};
};

TEST_F(OwnProgram, TrainsAsTheCommandDoesWithItsDataMetricAndCallback) {
  const Outcome outcome = run_own({"-n", "2", "--train.steps=8", "--train.val_every=4"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "sums modulo 10, 4,096 + 128 sequences")) << outcome.err;
  const auto made = steps();
  ASSERT_EQ(made.size(), 8u);
  for (const auto& step : made)
    EXPECT_EQ(step.contains("val_accuracy"), step["step"].get<int>() % 4 == 0) << step;
  EXPECT_EQ(summary()["final_val_accuracy"], made.back()["val_accuracy"]);
  EXPECT_TRUE(contains(front_.manifest()["command"], "own_data_example")) << front_.manifest();
  EXPECT_TRUE(contains(read_file(run_file("config.yaml")), "path: program"));
  EXPECT_EQ(front_.manifest()["program"], TRIREME_OWN_DATA);
  const Outcome report = front_.run({"report", "latest"});
  EXPECT_EQ(report.code, 0) << report.err;
}

TEST_F(OwnProgram, StopsAndGoesOnExactly) {
  const Words words = {
      "-n", "2", "--train.steps=12", "--train.val_every=4", "--checkpoint.every=3", "--optim.warmup_steps=2"};
  ASSERT_EQ(run_own(words + Words{"--name=whole"}).code, 0);
  const std::string whole = summary()["weights_digest"];
  ASSERT_EQ(run_own(words + Words{"--name=part", "--train.steps=6"}).code, 0);
  const Outcome resumed = run_own(words + Words{"--name=part", "--resume", "latest"});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(summary()["resumed_at"], 6);
  // A schedule that knew of fewer steps has had other rates: a constant one has not.
  const Words constant = words + Words{"--optim.schedule=constant"};
  ASSERT_EQ(run_own(constant + Words{"--name=whole"}).code, 0);
  const std::string other = summary()["weights_digest"];
  EXPECT_NE(other, whole);
  ASSERT_EQ(run_own(constant + Words{"--name=part", "--train.steps=6"}).code, 0);
  ASSERT_EQ(run_own(constant + Words{"--name=part", "--resume", "latest"}).code, 0);
  EXPECT_EQ(summary()["weights_digest"], other);
}

TEST_F(OwnProgram, IsRanksOfAnyLauncher) {
  const Words words = {"--train.steps=2", "--checkpoint.every=0"};
  ASSERT_EQ(run_own(words + Words{"-n", "2"}).code, 0);
  const std::string by_itself = summary()["weights_digest"];
  const Outcome launched =
      front_.run(Words{"launch", "-n", "2", TRIREME_OWN_DATA} + kConfig + words + Words{"--name=launched"});
  ASSERT_EQ(launched.code, 0) << launched.err;
  EXPECT_EQ(front_.manifest()["ranks"], 2);
  EXPECT_EQ(summary()["weights_digest"], by_itself);
}

TEST_F(OwnProgram, TheCommandAloneRefusesItsRuns) {
  ASSERT_EQ(run_own({"-n", "1", "--train.steps=2"}).code, 0);
  const Outcome alone = front_.run({"train", "-n", "1", "--resume", "latest", "--train.steps=4"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_TRUE(contains(alone.err, "a program of your own")) << alone.err;
  EXPECT_TRUE(contains(alone.err, "./program")) << alone.err;
}

TEST_F(OwnProgram, LeavesDataThatAreNamedAndGoesOnWithThem) {
  const Words text = {"-n", "1", "--train.steps=2", "--data.path=text.txt", "--model.vocab_size=259"};
  const Outcome outcome = run_own(text);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  front_.run_instead(TRIREME_OWN_DATA);
  const Outcome resumed = front_.run({"--resume", "latest", "-n", "1", "--train.steps=4"});
  front_.run_instead("");
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_TRUE(contains(read_file(run_file("config.yaml")), "text.txt"));
}

TEST_F(OwnProgram, SaysWhatIsWrong) {
  EXPECT_EQ(run_own({"-n", "1", "--train.monitor=acuracy"}).code, 2);
  EXPECT_EQ(run_own({"-n", "1", "--model.vocab_size=12"}).code, 2);
  EXPECT_EQ(run_own({"-n", "1", "--train.sample_tokens=5"}).code, 2);
  EXPECT_EQ(run_own({"-n", "1", "--no.such=key"}).code, 2);
  front_.set("TRIREME_COMMAND", "/nowhere/trireme");
  const Outcome lost = run_own({"-n", "1"});
  EXPECT_EQ(lost.code, 3);
  EXPECT_TRUE(contains(lost.err, "TRIREME_COMMAND")) << lost.err;
}

}  // namespace
}  // namespace trireme::cli
