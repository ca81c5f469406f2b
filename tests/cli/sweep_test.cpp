// trireme sweep: which runs it makes, in which order, and what it says of them.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

/// A worker whose last loss is ten times its learning rate; `then` comes behind.
std::string learns(const std::string& then) {
  return "run=$(printf %s \"$TRIREME_REQUEST\" | sed 's/.*\"run_dir\":\"\\([^\"]*\\)\".*/\\1/')\n"
         "lr=$(printf %s \"$TRIREME_REQUEST\" | sed 's/.* lr: \\([0-9.e-]*\\).*/\\1/')\n"
         "[ \"$RANK\" = 0 ] || exit 0\n"
         "echo \"$lr\" >> order\n"
         "awk -v lr=\"$lr\" 'BEGIN { printf \"{\\\"step\\\": 1, \\\"loss\\\": %g, \\\"step_ms\\\": "
         "1.0}\\n\", 10 * lr }' > \"$run\"/metrics.jsonl\n" +
         then;
}

const Words kSweep = {"sweep", "--device=cpu", "-n", "2", "--name=tiny", "--train.steps=1"};

TEST(Sweep, RunsEveryCombinationInOrderAndNamesTheBest) {
  FrontProcess front;
  front.set_worker(learns(""));
  const Outcome outcome =
      front.run(kSweep + Words{"--grid", "optim.lr=0.3,0.1", "--grid", "train.global_batch=8,16", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(read_file(front.file("order")), "0.3\n0.3\n0.1\n0.1\n");
  const auto json = outcome.json();
  ASSERT_EQ(json["runs"].size(), 4u);
  EXPECT_EQ(json["runs"][1]["values"]["optim.lr"], "0.3");
  EXPECT_EQ(json["runs"][1]["values"]["train.global_batch"], "16");
  EXPECT_DOUBLE_EQ(json["runs"][2]["loss"].get<double>(), 1.0);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(json["runs"][i]["best"], i == 2) << i;
  for (size_t i = 0; i < 4; ++i) {
    const std::string run = json["runs"][i]["run"];
    EXPECT_TRUE(contains(run, "tiny-" + std::to_string(i + 1))) << run;
  }
  EXPECT_TRUE(std::filesystem::exists(json["page"].get<std::string>())) << json["page"];
}

TEST(Sweep, GoesOnBehindARunThatFails) {
  FrontProcess front;
  front.set_worker(learns("[ \"$lr\" = 0.3 ] && exit 6\nexit 0\n"));
  const Outcome outcome = front.run(kSweep + Words{"--grid", "optim.lr=0.3,0.2"});
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  EXPECT_EQ(read_file(front.file("order")), "0.3\n0.2\n");
  EXPECT_TRUE(contains(outcome.err, "optim.lr=0.3 ended with code 6")) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "failed with code 6")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "(best)")) << outcome.out;
}

TEST(Sweep, ChecksEveryCombinationBeforeTheFirstRun) {
  FrontProcess front;
  front.set_worker(learns(""));
  for (const Words& grid :
       {Words{"--grid", "optim.lr=0.1,-1"}, Words{"--grid", "optim.rl=0.1"},
        Words{"--grid", "train.global_batch=8,9"}, Words{"--grid", "optim.lr"}, Words{"--grid", "optim.lr="},
        Words{"--grid", "=1"}, Words{}, Words{"--grid", "optim.lr=0.1", "--grid", "optim.lr=0.2"},
        Words{"--grid", "optim.lr=0.1", "-o", "nowhere/page.html"}}) {
    const Outcome outcome = front.run(kSweep + grid);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("order")));
}

TEST(Sweep, EndsWhereItIsStopped) {
  FrontProcess front;
  front.set_worker(learns("exit 130\n"));
  const Outcome outcome = front.run(kSweep + Words{"--grid", "optim.lr=0.3,0.2"});
  EXPECT_EQ(outcome.code, 130) << outcome.err;
  EXPECT_EQ(read_file(front.file("order")), "0.3\n");
}

/// Values with commas are separated by semicolons.
TEST(Sweep, TakesValuesWithCommas) {
  FrontProcess front;
  front.set_worker(learns(""));
  const Outcome outcome = front.run(kSweep + Words{"--parallel.pp=2", "--pipeline.micro_batches=2", "--grid",
                                                   "pipeline.split=3,1;2,2", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["runs"][0]["values"]["pipeline.split"], "3,1");
}

}  // namespace
}  // namespace trireme::cli
