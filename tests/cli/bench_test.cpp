// `bench memory` and `bench speed` with a script in the worker's place: what is refused before anything runs,
// and what is left of a bench whose later runs fail.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/index.h"
#include "trireme/cli/bench_runs.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

const Words kTwoRanks = {"-n", "2", "--device=cpu", "--train.global_batch=4"};

TEST(Bench, RefusesACaseBeforeTheFirstOneRuns) {
  FrontProcess front;
  front.set_worker("touch started");
  for (const char* verb : {"memory", "speed"}) {
    const Outcome outcome =
        front.run(Words{"bench", verb, "--policies", "ddp,fsdp:hybrid_shard"} + kTwoRanks);
    EXPECT_EQ(outcome.code, 2) << verb << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "fsdp:hybrid_shard needs replicas")) << verb << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(front.file("started"))) << verb;
    EXPECT_FALSE(std::filesystem::exists(front.file("runs"))) << verb;
  }
}

TEST(Bench, PrintsWhatWasMeasuredBeforeARunFailed) {
  for (const char* verb : {"memory", "speed"}) {
    FrontProcess front;
    front.set_worker("[ $RANK = 1 ] && exit 0\n[ -e ran ] && exit 6\ntouch ran\n" + leave_summary());
    Words words = Words{"bench", verb, "--policies", "ddp,zero1", "--json"} + kTwoRanks;
    if (verb == std::string("speed")) words = words + Words{"--micro-batch-sizes", "2", "--rounds", "1"};
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 6) << verb << outcome.err;
    ASSERT_NE(outcome.out, "") << verb << outcome.err;
    const auto rows = outcome.json()["rows"];
    ASSERT_EQ(rows.size(), 1u) << rows;
    EXPECT_EQ(rows[0]["policy"], "ddp");
    EXPECT_TRUE(outcome.json().value("recommended", nlohmann::json()).is_null()) << outcome.out;
  }
}

TEST(Bench, PrintsNothingWhereTheFirstRunFailed) {
  FrontProcess front;
  front.set_worker("exit 6");
  for (const char* verb : {"memory", "speed"}) {
    const Outcome outcome = front.run(Words{"bench", verb, "--policies", "ddp"} + kTwoRanks);
    EXPECT_EQ(outcome.code, 6) << verb << outcome.err;
    EXPECT_EQ(outcome.out, "") << verb;
  }
}

/// Another policy may need less.
TEST(Bench, MemoryGoesOnAfterARunThatDoesNotFit) {
  FrontProcess front;
  front.set_worker("[ $RANK = 1 ] && exit 0\n[ -e ran ] || { touch ran; exit 4; }\n" + leave_summary());
  const Outcome outcome =
      front.run(Words{"bench", "memory", "--policies", "ddp,zero3", "--json"} + kTwoRanks);
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  ASSERT_NE(outcome.out, "") << outcome.err;
  ASSERT_EQ(outcome.json()["rows"].size(), 1u) << outcome.out;
  EXPECT_EQ(outcome.json()["rows"][0]["policy"], "zero3");
}

/// What a config says for a real run is no reason to refuse a bench of it, and none to save anything.
TEST(Bench, NeverLooksLikeARun) {
  const Words saving = {"--name=tiny", "--device=cpu", "-n", "1", "--checkpoint.every=2"};
  for (const char* verb : {"memory", "speed"}) {
    FrontProcess front;
    front.set_worker(recorder(75));
    EXPECT_EQ(front.run(Words{"train", "--train.steps=300"} + saving).code, 75);
    const auto real = std::filesystem::canonical(front.file("runs/latest"));
    const std::string step = real / "checkpoints/step-00000002";
    make_directories(step);
    write_file_atomic(step + "/COMMIT.json", checkpoint::format_commit({.step = 2, .generation = 1}));

    front.set_worker(leave_summary() + recorder(0));
    const Words best = {"--policies", "ddp", "--checkpoint.best=true", "--optim.warmup_steps=100"};
    const Outcome outcome = front.run(Words{"bench", verb} + best + saving);
    EXPECT_EQ(outcome.code, 0) << verb << outcome.err;
    const Request request = request_from_json(read_file(front.file("request-0")));
    const plan::Config config =
        plan::load({.path = "", .text = request.config, .overrides = {}}, Environment()).config;
    EXPECT_EQ(config.checkpoint.every, 0) << verb;
    EXPECT_FALSE(config.checkpoint.best) << verb;
    EXPECT_FALSE(config.checkpoint.final_weights) << verb;
    EXPECT_EQ(config.train.steps, kBenchSteps) << verb;

    EXPECT_EQ(std::filesystem::canonical(front.file("runs/latest")), real) << verb;
    EXPECT_TRUE(std::filesystem::exists(front.file("runs/bench/latest/summary.json"))) << verb;
    front.set_worker(recorder(75));
    EXPECT_EQ(front.run(Words{"train", "--train.steps=300", "--resume"} + saving).code, 75);
    EXPECT_TRUE(request_from_json(read_file(front.file("request-0"))).resume) << verb;
    EXPECT_EQ(std::filesystem::canonical(front.file("runs/latest")), real) << verb;
  }
}

TEST(Bench, IsAsLongAsTheCommandLineSays) {
  FrontProcess front;
  const auto steps_of = [&](const Words& words) {
    front.set_worker(leave_summary() + recorder(0));
    const Outcome outcome =
        front.run(Words{"bench", "memory", "--policies", "ddp", "--device=cpu", "-n", "1"} + words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Request request = request_from_json(read_file(front.file("request-0")));
    return plan::load({.path = "", .text = request.config, .overrides = {}}, Environment())
        .config.train.steps;
  };
  EXPECT_EQ(steps_of({"--train.steps=7"}), 7);
  EXPECT_EQ(steps_of({"--train.steps=7", "--steps", "9"}), 9);
}

}  // namespace
}  // namespace trireme::cli
