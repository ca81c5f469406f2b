// Lies that are planted in the ranks of one arm, in real processes, keep `bench run` from saying a ratio; the
// same runs without a lie have one.
#include <filesystem>
#include <string>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

class Lies : public Worker {
 protected:
  /// Measures zero1 beside ddp where the ranks of the arm whose policy is `arm` do `plant` before they train,
  /// and `then` behind it. Shell, which finds the request in $TRIREME_REQUEST and the run's folder in $run.
  nlohmann::json measure(const std::string& arm, const std::string& plant, const std::string& then = "") {
    front_.set_worker(
        "run=$(printf %s \"$TRIREME_REQUEST\" | sed 's/.*\"run_dir\":\"\\([^\"]*\\)\".*/\\1/')\n"
        "change() { TRIREME_REQUEST=$(printf %s \"$TRIREME_REQUEST\" | sed \"s/$1/$2/\"); }\n"
        "case \"$TRIREME_REQUEST\" in *'policy: " +
        arm + "'*) lies=true ;; *) lies=false ;; esac\n" + "if $lies; then :; " + plant +
        "\nfi\nexport TRIREME_REQUEST\n'" TRIREME_WORKER "' \"$@\"; code=$?\n" +
        "if $lies && [ \"$RANK\" = 0 ]; then :; " + then + "\nfi\nexit $code\n");
    std::filesystem::remove_all(front_.file("out"));
    const Outcome outcome = front_.run({"bench",
                                        "run",
                                        "--targets",
                                        "zero1",
                                        "-n",
                                        "2",
                                        "--device=cpu",
                                        "--data.path=text.txt",
                                        "--model.n_layers=1",
                                        "--model.d_model=32",
                                        "--model.n_heads=2",
                                        "--model.n_kv_heads=2",
                                        "--data.seq_len=32",
                                        "--train.global_batch=8",
                                        "--iterations",
                                        "6",
                                        "--warmup",
                                        "2",
                                        "--replicates",
                                        "1",
                                        "--profile",
                                        "none",
                                        "--out",
                                        "out",
                                        "--format",
                                        "json"});
    nlohmann::json target = nlohmann::json::parse(read_file(front_.file("out/results.json")))["targets"][0];
    target["code"] = outcome.code;
    target["said"] = outcome.out + outcome.err;
    return target;
  }

  /// `by`: words of the reason.
  void expect_caught(const nlohmann::json& target, const std::string& by) {
    EXPECT_NE(target["state"], "measured") << target["said"];
    EXPECT_TRUE(target["code"] == 8 || target["code"] == 1) << target["code"];
    EXPECT_TRUE(contains(target["reason"], by)) << target["reason"];
    for (const auto& score : target["scores"])
      EXPECT_FALSE(score.contains("ratio") && score["ratio"].is_number());
  }
};

TEST_F(Lies, WithoutOneThereIsARatio) {
  const nlohmann::json target = measure("zero1", "");
  EXPECT_EQ(target["state"], "measured") << target["said"];
  EXPECT_EQ(target["code"], 0);
}

TEST_F(Lies, AnOptimizerThatDoesNotStepIsFound) {
  expect_caught(measure("zero1", "change ' lr: [0-9.e-]*' ' lr: 1e-30'"), "digest");
}

TEST_F(Lies, ARankThatTrainsSomethingElseEndsTheRun) {
  expect_caught(measure("zero1", "[ \"$RANK\" = 0 ] || change ' grad_clip: [0-9.e-]*' ' grad_clip: 1e-3'"),
                "ended with code 2");
}

#ifdef TRIREME_WRONG_GRADIENT
/// The sum over ranks is wrong, so that all ranks agree on wrong weights.
constexpr const char* kWrongOnRank1 = "[ \"$RANK\" = 0 ] || export LD_PRELOAD='" TRIREME_WRONG_GRADIENT "'";

TEST_F(Lies, AWrongGradientOnOneRankIsFound) {
  for (const char* arm : {"zero1", "ddp"})
    expect_caught(measure(arm, kWrongOnRank1), "its weights have the digest");
}

/// No arm tells then, but one rank alone does, which has no other rank's gradients.
TEST_F(Lies, AWrongGradientOnOneRankOfEveryArmIsFound) {
  expect_caught(measure("", kWrongOnRank1), "one rank that shards nothing trains the same");
}
#endif

TEST_F(Lies, AnotherBatchIsFound) {
  expect_caught(
      measure("zero1",
              "change ' global_batch: 8' ' global_batch: 4'; change ' micro_batch: 4' ' micro_batch: 2'"),
      "tokens a step");
}

TEST_F(Lies, ABaselineThatTrainsASmallerModelIsFound) {
  expect_caught(measure("ddp", "change ' d_ff: [0-9]*' ' d_ff: 16'"), "its weights have the digest");
}

TEST_F(Lies, AChildThatCrashesFastIsAFailureAndNoTime) {
  expect_caught(measure("zero1", "exit 3"), "ended with code 3");
}

/// Either check tells: two runs share their times, or on a busy machine waits are longer than such a step.
TEST_F(Lies, SamplesThatWereClonedAreFound) {
  expect_caught(
      measure("zero1", "", "sed -i 's/\"step_ms\":[0-9.e-]*/\"step_ms\":1.5/' \"$run\"/metrics.jsonl"),
      "does not hold");
}

TEST_F(Lies, AClockThatJumpsIsFound) {
  expect_caught(
      measure("zero1", "", "sed -i '5s/\"step_ms\":[0-9.e-]*/\"step_ms\":9e7/' \"$run\"/metrics.jsonl"),
      "clocks hold together");
}

TEST_F(Lies, StepsThatAreLeftOutAreFound) {
  expect_caught(measure("zero1", "", "sed -i '$d' \"$run\"/metrics.jsonl"), "step");
}

}  // namespace
}  // namespace trireme::cli
