// `trireme train --train.fast_dev_run` with its real worker.
#include <filesystem>

#include "tests/cli/worker_fixture.h"

namespace trireme::cli {
namespace {

const Words kLong = kTiny + Words{"--train.steps=5000",
                                  "--optim.warmup_steps=100",
                                  "--train.val_every=1000",
                                  "--train.val_batches=7",
                                  "--name=long",
                                  "-n",
                                  "2"};

class DevRun : public Worker {
 protected:
  /// Names of what is in `folder`.
  std::vector<std::string> names_in(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(front_.file(folder)))
      names.push_back(entry.path().filename());
    return names;
  }
};

TEST_F(DevRun, TriesEverythingInAFolderOfItsOwn) {
  const Outcome outcome = front_.run(kLong + Words{"--train.fast_dev_run", "3"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* part :
       {"train.steps=3 instead of 5000", "train.val_batches=3 instead of 7",
        "optim.warmup_steps=3 instead of 100", "checkpoints/step-00000002", "resume  after step 2",
        "training, validation, saving, resuming and sampling work; runs/fast_dev_run/long-"})
    EXPECT_TRUE(contains(outcome.err, part)) << part << " in:\n" << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "step 3/3")) << outcome.out;
  EXPECT_EQ(names_in("runs"), std::vector<std::string>{"fast_dev_run"});
  const auto summary = read_json(front_.file("runs/fast_dev_run/latest/summary.json"));
  EXPECT_EQ(summary["steps"], 3);
  EXPECT_EQ(summary["resumed_at"], 2);
  EXPECT_TRUE(summary["final_val_loss"].is_number());
  EXPECT_EQ(read_json(front_.file("runs/fast_dev_run/latest/manifest.json"))["exit_code"], 0);
}

TEST_F(DevRun, LeavesNothingThatIsTakenForTheRealRun) {
  ASSERT_EQ(front_.run(kLong + Words{"--train.fast_dev_run=2"}).code, 0);
  EXPECT_EQ(front_.run({"generate", "latest"}).code, 2);
  EXPECT_EQ(front_.run({"train", "--resume", "latest"}).code, 2);
  const Outcome real =
      front_.run(kLong + Words{"--train.steps=2", "--optim.warmup_steps=0", "--resume=auto"});
  ASSERT_EQ(real.code, 0) << real.err;
  EXPECT_TRUE(contains(real.err, "starts a new run")) << real.err;
}

/// One step has no save before its last one; it is resumed at its end.
TEST_F(DevRun, OneStepIsEnough) {
  const Outcome outcome = front_.run(kLong + Words{"--train.fast_dev_run=1", "--train.val_batches=0"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "nothing was validated")) << outcome.err;
  EXPECT_EQ(read_json(front_.file("runs/fast_dev_run/latest/summary.json"))["steps"], 1);
}

TEST_F(DevRun, WorksInStages) {
  const Outcome outcome =
      front_.run(kLong + Words{"--train.fast_dev_run=2", "--parallel.pp=2", "--train.micro_batch=1"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST_F(DevRun, IsPlannedAsItWouldRun) {
  const Outcome outcome = front_.run(kLong + Words{"--train.fast_dev_run=2", "--dry-run", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front_.file("runs")));
}

TEST_F(DevRun, SaysWhereItIsNotPossible) {
  const Outcome resumed = front_.run(kLong + Words{"--train.fast_dev_run=2", "--resume"});
  EXPECT_EQ(resumed.code, 2);
  EXPECT_TRUE(contains(resumed.err, "train.fast_dev_run=2 tries a new run")) << resumed.err;
  become_rank(0, 1, 1);
  const Outcome launched = front_.run(kTiny + Words{"--train.fast_dev_run=2"});
  EXPECT_EQ(launched.code, 2);
  EXPECT_TRUE(contains(launched.err, "train.fast_dev_run=2 tries a new run")) << launched.err;
  EXPECT_FALSE(std::filesystem::exists(front_.file("runs")));
}

}  // namespace
}  // namespace trireme::cli
