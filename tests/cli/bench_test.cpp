// `bench memory` and `bench speed` with a script in the worker's place: what is refused before anything runs,
// and what is left of a bench whose later runs fail.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"

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
    if (verb == std::string("speed")) words = words + Words{"--micro-batches", "2", "--rounds", "1"};
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

}  // namespace
}  // namespace trireme::cli
