#include <gtest/gtest.h>

#include "tests/cli/front_process.h"
#include "trireme/cli/request.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

constexpr const char* kRecorder = "printf %s \"$TRIREME_REQUEST\" > request; echo verb $1";

TEST(Generate, HandsTheRunAndTheSamplingToTheWorker) {
  FrontProcess front;
  front.set_worker(kRecorder);
  const auto run = report::RunDirectory::create(front.file("runs"), "tiny", {});
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

TEST(Generate, FindsARunByPathByNameAndByLatest) {
  FrontProcess front;
  front.set_worker(kRecorder);
  front.set("TRIREME_RUN_DIR", front.file("elsewhere"));
  const auto run = report::RunDirectory::create(front.file("elsewhere"), "tiny", {});
  const std::string name = std::filesystem::path(run.path()).filename().string();
  for (const std::string& word : {run.path(), name, std::string("latest"), "elsewhere/" + name}) {
    ASSERT_EQ(front.run({"generate", word}).code, 0) << word;
    const Request request = request_from_json(read_file(front.file("request")));
    EXPECT_TRUE(std::filesystem::equivalent(request.generate.run, run.path())) << word;
  }
}

TEST(Generate, RefusesAFolderThatIsNoRun) {
  FrontProcess front;
  front.set_worker(kRecorder);
  make_directories(front.file("empty"));
  for (const char* word : {"empty", "absent", "latest"}) {
    const Outcome outcome = front.run({"generate", word});
    EXPECT_EQ(outcome.code, 7) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, word)) << outcome.err;
  }
}

TEST(Generate, RefusesSamplingThatMeansNothing) {
  FrontProcess front;
  front.set_worker(kRecorder);
  report::RunDirectory::create(front.file("runs"), "tiny", {});
  for (const auto& option : {"--max-tokens=0", "--temperature=-1", "--temperature=nan", "--top-k=-2"}) {
    const Outcome outcome = front.run({"generate", "latest", option});
    EXPECT_EQ(outcome.code, 2) << option << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("request")));
}

}  // namespace
}  // namespace trireme::cli
