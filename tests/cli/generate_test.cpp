#include <gtest/gtest.h>

#include <optional>

#include "tests/checkpoint/saved.h"
#include "tests/cli/front_process.h"
#include "trireme/cli/request.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

/// A run below `runs` of the front's folder; with a code it has ended, and with weights it has some.
report::RunDirectory make_run(const FrontProcess& front, const std::string& name, std::optional<int> code,
                              bool weights) {
  const auto run = report::RunDirectory::create(front.file("runs"), name, {});
  if (code) run.finish(*code);
  if (weights) {
    make_directories(run.file("checkpoints/final"));
    write_file_atomic(run.file("checkpoints/final/model.safetensors"), "x");
  }
  return run;
}

constexpr const char* kRecorder = "printf %s \"$TRIREME_REQUEST\" > request; echo verb $1";

TEST(Generate, HandsTheRunAndTheSamplingToTheWorker) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto run = make_run(front, "tiny", 0, true);
  const Outcome outcome = front.run({"generate", "latest", "--prompt", "-int main(", "--max-tokens", "9",
                                     "--temperature", "0.5", "--top-k=3", "--seed", "11", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "verb generate\n");
  const Request request = request_from_json(read_file(front.file("request")));
  EXPECT_TRUE(std::filesystem::equivalent(request.generate.run, run.path()));
  EXPECT_EQ(request.generate.prompt, "-int main(");
  EXPECT_EQ(request.generate.max_tokens, 9);
  EXPECT_EQ(request.generate.temperature, 0.5);
  EXPECT_EQ(request.generate.top_k, 3);
  EXPECT_EQ(request.generate.seed, 11);
  EXPECT_TRUE(request.json);
}

TEST(Generate, FindsARunByPathByFolderByNameAndByLatest) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_run(front, "tiny", 0, true);
  const auto run = make_run(front, "tiny", 0, true);
  make_run(front, "tiny-2", 0, false);
  std::filesystem::rename(front.file("runs"), front.file("elsewhere"));
  front.set("TRIREME_RUN_DIR", front.file("elsewhere"));
  const std::string name = std::filesystem::path(run.path()).filename().string();
  for (const std::string& word : {front.file("elsewhere/" + name), name, std::string("tiny"),
                                  std::string("latest"), "elsewhere/" + name}) {
    const Outcome outcome = front.run({"generate", word});
    ASSERT_EQ(outcome.code, 0) << word << outcome.err;
    const Request request = request_from_json(read_file(front.file("request")));
    EXPECT_EQ(std::filesystem::path(request.generate.run).filename(), name) << word;
  }
}

TEST(Generate, LatestIsTheLatestRunThatHasWeights) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto good = make_run(front, "good", 0, true);
  const auto failed = make_run(front, "failed", 6, false);
  const Outcome outcome = front.run({"generate", "latest"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(std::filesystem::equivalent(request_from_json(read_file(front.file("request"))).generate.run,
                                          good.path()));
  EXPECT_TRUE(contains(outcome.err, failed.path() +
                                        " has no weights: it ended with code 6 (NaN or infinity); "
                                        "using " +
                                        good.path()))
      << outcome.err;
}

TEST(Generate, NamesEveryRunThatItPassesOver) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_run(front, "good", 0, true);
  const auto failed = make_run(front, "failed", 6, false);
  const auto interrupted = make_run(front, "interrupted", 130, false);
  const Outcome outcome = front.run({"generate", "latest", "--prompt="});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const std::string& part : {failed.path() + " has no weights: it ended with code 6",
                                  interrupted.path() + " has no weights: it ended with code 130"})
    EXPECT_TRUE(contains(outcome.err, part)) << part << " in: " << outcome.err;
  EXPECT_EQ(request_from_json(read_file(front.file("request"))).generate.prompt, "");
}

/// That a run has begun to write there is no checkpoint.
TEST(Generate, TakesTheFinalWeightsOfARunThatHasSavedNothingElse) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto run = make_run(front, "tiny", 0, true);
  write_file_atomic(run.file("checkpoints/GENERATION"), "1\n");
  const Outcome outcome = front.run({"generate", "tiny"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST(Generate, LatestPassesOverRunsOnImages) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto text = make_run(front, "text", 0, true);
  const auto images = make_run(front, "images", 0, true);
  write_file_atomic(images.file("config.yaml"), "model: {family: resnet}\n");
  const Outcome outcome = front.run({"generate", "latest"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "is passed over: its model reads images")) << outcome.err;
  const Request request = request_from_json(read_file(front.file("request")));
  EXPECT_TRUE(std::filesystem::equivalent(request.generate.run, text.path()));
}

TEST(Generate, LooksBelowTheFolderThatIsNamed) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_run(front, "tiny", 0, true);
  std::filesystem::rename(front.file("runs"), front.file("elsewhere"));
  EXPECT_EQ(front.run({"generate", "tiny"}).code, 2);
  EXPECT_EQ(front.run({"generate", "tiny", "--run-dir", "elsewhere"}).code, 0);
  const Outcome list = front.run({"ckpt", "inspect", "tiny", "--run-dir=elsewhere"});
  EXPECT_FALSE(contains(list.err, "no run 'tiny' was found")) << list.err;
}

/// What an attempt before has left is no weights of a run that goes on, or has ended without any.
TEST(Generate, TakesNoFinalWeightsOfAnEarlierAttempt) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto run = make_run(front, "tiny", 0, true);
  const auto weights = [&] {
    const Outcome outcome = front.run({"generate", "tiny"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return std::filesystem::path(request_from_json(read_file(front.file("request"))).generate.weights)
        .filename()
        .string();
  };
  write_file_atomic(run.file("summary.json"), R"({"weights":"x"})");
  EXPECT_EQ(weights(), "model.safetensors");
  write_file_atomic(run.file("summary.json"), R"({"weights":null})");
  EXPECT_EQ(front.run({"generate", "tiny"}).code, 2);
  {
    checkpoint::Store store(run.file("checkpoints"));
    checkpoint::testing::save(store, {.replicas = 1, .shards = 1, .stages = 1, .tensor = 1}, 8);
  }
  EXPECT_EQ(weights(), "step-00000008");
  std::filesystem::remove(run.file("summary.json"));  // it goes on, or was killed
  EXPECT_EQ(weights(), "step-00000008");
}

TEST(Generate, SaysWhichRunLacksWeightsAndWhyItEnded) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const std::pair<std::optional<int>, const char*> ends[] = {
      {6, "it ended with code 6 (NaN or infinity)"},
      {130, "it ended with code 130 (interrupted)"},
      {std::nullopt, "it is still running, or was killed"},
      {0, "it finished, but was configured to save none"}};
  for (const auto& [code, why] : ends) {
    const auto run = make_run(front, "tiny", code, false);
    const std::string folder = std::filesystem::path(run.path()).filename().string();
    for (const std::string& word : {std::string("latest"), std::string("tiny"), folder}) {
      const Outcome outcome = front.run({"generate", word});
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      for (const std::string& part : {run.path(), std::string(why)})
        EXPECT_TRUE(contains(outcome.err, part)) << word << " " << part << " in: " << outcome.err;
    }
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("request")));
}

TEST(Generate, RefusesAFolderThatIsNoRun) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_directories(front.file("empty"));
  for (const char* word : {"empty", "absent", "latest"}) {
    const Outcome outcome = front.run({"generate", word});
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, word)) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, front.file(""))) << "the real folder: " << outcome.err;
  }
}

TEST(Generate, RefusesSamplingThatMeansNothing) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_run(front, "tiny", 0, true);
  for (const auto& option : {"--max-tokens=0", "--max-tokens=99999999999", "--temperature=-1",
                             "--temperature=nan", "--top-k=-2"}) {
    const Outcome outcome = front.run({"generate", "latest", option});
    EXPECT_EQ(outcome.code, 2) << option << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("request")));
}

}  // namespace
}  // namespace trireme::cli
