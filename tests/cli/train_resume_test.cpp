// `train --resume` with a script in the worker's place: which run goes on, and what is left of it.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/env.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/index.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

Request last_request(const FrontProcess& front) {
  return request_from_json(read_file(front.file("request-0")));
}

/// Run directories may be named from where the front command runs.
std::string run_directory(const FrontProcess& front) {
  const std::filesystem::path named(last_request(front).run_dir);
  return std::filesystem::canonical(named.is_absolute() ? named.string() : front.file(named));
}

/// What tells of the first save in the newest run.
void leave_checkpoints(const FrontProcess& front) {
  const std::string folder = front.file("runs/latest/checkpoints/step-00000001");
  make_directories(folder);
  write_file_atomic(folder + "/COMMIT.json", checkpoint::format_commit({.step = 1, .generation = 1}));
}

TEST(TrainRun, ResumesTheNewestUnfinishedRunOfItsName) {
  FrontProcess front;
  front.set_worker(recorder(75));
  const Words words = {"train", "--device=cpu", "-n", "1", "--name=tiny", "--train.steps=3", "--resume"};
  EXPECT_EQ(front.run(words).code, 75);
  const std::string first = run_directory(front);
  EXPECT_FALSE(last_request(front).resume);  // there was nothing
  leave_checkpoints(front);
  EXPECT_EQ(front.run(words).code, 75);
  EXPECT_EQ(run_directory(front), first);
  EXPECT_TRUE(last_request(front).resume);
  EXPECT_EQ(last_request(front).resume_from, "");
  EXPECT_EQ(front.manifest()["attempts"].size(), 2u);
  EXPECT_EQ(front.manifest()["attempts"][0]["exit_code"], 75);

  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(words).code, 0);
  EXPECT_EQ(run_directory(front), first);
  EXPECT_EQ(front.manifest()["exit_code"], 0);
  EXPECT_EQ(front.run(words).code, 0);  // the run has come to its end
  EXPECT_NE(run_directory(front), first);
  EXPECT_FALSE(last_request(front).resume);
}

TEST(TrainRun, ResumesARunByItsNameWithItsConfig) {
  FrontProcess front;
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--name=tiny", "--train.steps=3"}).code, 0);
  const std::string first = run_directory(front);
  const Outcome none = front.run({"train", "-n", "1", "--resume", "tiny"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(contains(none.err, "checkpoints")) << none.err;
  leave_checkpoints(front);
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", "tiny", "--train.steps=5"}).code, 0);
  const Request request = last_request(front);
  EXPECT_TRUE(request.resume);
  EXPECT_EQ(run_directory(front), first);
  const auto config = plan::load({.path = "", .text = request.config, .overrides = {}}, Environment()).config;
  EXPECT_EQ(config.name, "tiny");
  EXPECT_EQ(config.train.steps, 5);

  make_directories(front.file("runs/latest/checkpoints/step-00000002"));
  write_file_atomic(front.file("runs/latest/checkpoints/step-00000002/index.json"), "");
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", "runs/latest/checkpoints/step-00000002"}).code, 0);
  EXPECT_TRUE(last_request(front).resume_from.ends_with("checkpoints/step-00000002"));
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", "nothing"}).code, 2);
}

/// A run begins to write to the folder of its checkpoints long before it has one.
TEST(TrainRun, ARunThatHasSavedNothingIsNoneToGoOnWith) {
  FrontProcess front;
  front.set_worker(recorder(5));
  const Words words = {"train", "--device=cpu", "-n", "1", "--name=tiny", "--train.steps=3"};
  EXPECT_EQ(front.run(words).code, 5);
  const std::string first = run_directory(front);
  make_directories(first + "/checkpoints/step-00000001");
  write_file_atomic(first + "/checkpoints/GENERATION", "1\n");
  const Outcome named = front.run({"train", "-n", "1", "--resume", "tiny"});
  EXPECT_EQ(named.code, 2);
  EXPECT_TRUE(contains(named.err, "has no checkpoints")) << named.err;
  EXPECT_EQ(front.run(words + Words{"--resume"}).code, 5);
  EXPECT_NE(run_directory(front), first);
  EXPECT_FALSE(last_request(front).resume);
}

const Words kTinyRun = {"train", "--device=cpu", "-n", "1", "--name=tiny", "--train.steps=3"};

std::string newest_run(const FrontProcess& front) {
  return std::filesystem::canonical(front.file("runs/latest"));
}

/// A run that was preempted and has checkpoints.
std::string leave_unfinished_run(FrontProcess& front) {
  front.set_worker(recorder(75));
  EXPECT_EQ(front.run(kTinyRun).code, 75);
  leave_checkpoints(front);
  return newest_run(front);
}

/// What a run that can save holds.
class HeldLock {
 public:
  explicit HeldLock(const std::string& run)
      : fd_(::open((run + "/checkpoints/LOCK").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    EXPECT_EQ(::flock(fd_, LOCK_EX | LOCK_NB), 0);
    EXPECT_EQ(::write(fd_, "4711", 4), 4);
  }
  HeldLock(const HeldLock&) = delete;
  HeldLock& operator=(const HeldLock&) = delete;
  ~HeldLock() { ::close(fd_); }

 private:
  int fd_;
};

TEST(TrainResume, ARunThatIsRunningIsRefusedAndStaysAsItIs) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  write_file_atomic(run + "/metrics.jsonl", "{\"step\": 1}\n");
  const std::string manifest_before = read_file(run + "/manifest.json");
  const HeldLock lock(run);
  const std::string step = run + "/checkpoints/step-00000002";
  make_directories(step);
  write_file_atomic(step + "/index.json", "");
  for (const std::string& what : {run, std::string("tiny"), std::string("latest"), step}) {
    std::filesystem::remove(front.file("request-0"));
    const Outcome outcome = front.run({"train", "-n", "1", "--resume", what});
    EXPECT_EQ(outcome.code, 3) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, run + " is running: process 4711")) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "stop it first")) << outcome.err;
    EXPECT_FALSE(std::filesystem::exists(front.file("request-0")));
  }
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest_before);
  EXPECT_EQ(read_file(run + "/metrics.jsonl"), "{\"step\": 1}\n");
}

TEST(TrainResume, AutoPassesOverARunThatIsRunning) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  const std::string manifest_before = read_file(run + "/manifest.json");
  const HeldLock lock(run);
  const Outcome outcome = front.run(kTinyRun + Words{"--resume"});
  EXPECT_EQ(outcome.code, 75) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "which is running")) << outcome.err;
  EXPECT_NE(newest_run(front), run);
  EXPECT_FALSE(last_request(front).resume);
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest_before);
}

TEST(TrainResume, WhatRanksRefuseLeavesTheRunAsItIs) {
  FrontProcess front;
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(kTinyRun).code, 0);
  leave_checkpoints(front);
  const std::string run = newest_run(front);
  write_file_atomic(run + "/summary.json", "{}");
  const std::string manifest = read_file(run + "/manifest.json");
  front.set_worker(recorder(2));
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", run, "--max-restarts=2"}).code, 2);
  EXPECT_EQ(last_request(front).attempt, 2);
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest);
  EXPECT_EQ(read_file(run + "/summary.json"), "{}");
  front.set_worker(recorder(7));  // all of its checkpoints are damaged
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", run, "--max-restarts=2"}).code, 7);
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest);
  EXPECT_EQ(read_file(run + "/summary.json"), "{}");
  // Nor does it make the run one that is to be taken up.
  front.set_worker(recorder(6));
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", run}).code, 6);
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(kTinyRun + Words{"--resume"}).code, 0);
  EXPECT_NE(newest_run(front), run);
  EXPECT_FALSE(last_request(front).resume);
}

TEST(TrainResume, OfTwoAtOnceTheSecondIsRefusedAndLeavesTheRunToTheFirst) {
  FrontProcess front, other;
  const std::string run = leave_unfinished_run(front);
  other.set_worker("touch started");
  front.set_worker(": > up; while [ ! -e go ]; do sleep 0.02; done; exit 0");
  auto first = front.start({"train", "-n", "1", "--resume", run});
  while (!std::filesystem::exists(front.file("up"))) ::usleep(5'000);
  const std::string manifest = read_file(run + "/manifest.json");
  const Outcome second = other.run({"train", "-n", "1", "--resume", run});
  EXPECT_EQ(second.code, 3) << second.err;
  EXPECT_TRUE(contains(second.err, run + " is running: process ")) << second.err;
  EXPECT_FALSE(std::filesystem::exists(other.file("started")));
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest);
  write_file_atomic(front.file("go"), "");
  EXPECT_EQ(first.wait(20.0).code, 0);
  const auto json = front.manifest();
  ASSERT_EQ(json["attempts"].size(), 2u) << json;
  EXPECT_EQ(json["attempts"][1]["exit_code"], 0);
}

TEST(TrainResume, SaysOnHowManyRanksItGoesOnAndHowToKeepThem) {
  FrontProcess front;
  front.set_worker(recorder(75));
  const Words words = {"train", "--device=cpu", "-n", "2", "--name=tiny", "--train.global_batch=4"};
  const Outcome began = front.run(words);
  EXPECT_TRUE(contains(began.err, " -n 2' continues it")) << began.err;
  EXPECT_EQ(last_request(front).ranks, 2);
  leave_checkpoints(front);
  const Words resume = {"train", "--resume", newest_run(front), "-n"};
  const Outcome fewer = front.run(resume + Words{"1"});
  EXPECT_TRUE(contains(fewer.err, "resume  on 1 rank, 2 before\n")) << fewer.err;
  EXPECT_EQ(front.manifest()["attempts"][1]["ranks"], 1);
  EXPECT_EQ(front.manifest()["ranks"], 1);
  const Outcome same = front.run(resume + Words{"1"});
  EXPECT_FALSE(contains(same.err, " before\n")) << same.err;
  const Outcome planned = front.run(resume + Words{"2", "--dry-run"});
  EXPECT_TRUE(contains(planned.err, " on 2 ranks, 1 before\n")) << planned.err;
  const Outcome chosen = front.run({"train", "--resume", newest_run(front)});
  EXPECT_FALSE(contains(chosen.err, " -n ")) << chosen.err;
}

TEST(TrainResume, AutoDoesNotGoBackBehindARunThatHasFinished) {
  FrontProcess front;
  const std::string older = leave_unfinished_run(front);
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(kTinyRun).code, 0);
  leave_checkpoints(front);
  const std::string finished = newest_run(front);
  EXPECT_EQ(front.run(kTinyRun + Words{"--resume=auto"}).code, 0);
  EXPECT_FALSE(last_request(front).resume);
  EXPECT_NE(newest_run(front), older);
  EXPECT_NE(newest_run(front), finished);
}

TEST(TrainResume, AutoSaysWhyItStartsANewRun) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Words automatic = kTinyRun + Words{"--resume"};
  const Outcome first = front.run(automatic);
  EXPECT_TRUE(
      contains(first.err, "starts a new run, because no run named 'tiny' below runs has a checkpoint"))
      << first.err;
  leave_checkpoints(front);
  const std::string finished = std::filesystem::path(newest_run(front)).filename();
  const Outcome dry = front.run(automatic + Words{"--dry-run"});
  EXPECT_TRUE(contains(dry.err, "would start a new run, because runs/" + finished + " has finished"))
      << dry.err;
  const Outcome second = front.run(automatic + Words{"--quiet"});
  EXPECT_TRUE(contains(second.err, "starts a new run, because runs/" + finished + " has finished"))
      << second.err;
}

/// A short trial of a config, under its name, that has finished since.
TEST(TrainResume, AutoPassesOverAFinishedRunThatWasAnotherJob) {
  FrontProcess front;
  const std::string real = leave_unfinished_run(front);
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(kTinyRun + Words{"--train.steps=2"}).code, 0);
  leave_checkpoints(front);
  const std::string trial = newest_run(front);
  EXPECT_EQ(front.run(kTinyRun + Words{"--train.steps=5", "--resume"}).code, 0);
  EXPECT_FALSE(last_request(front).resume) << "neither of them was to do that";
  const Outcome outcome = front.run(kTinyRun + Words{"--resume"});
  EXPECT_TRUE(last_request(front).resume) << outcome.err;
  EXPECT_EQ(run_directory(front), real);
  EXPECT_TRUE(contains(outcome.err, "passed over runs/")) << outcome.err;
  EXPECT_NE(trial, real);
}

/// The launcher of the run was killed, so its number is still in the lock that nobody holds.
TEST(TrainResume, WaitsForRanksWhoseLauncherWasKilled) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  write_file_atomic(run + "/LOCK", "4710");
  for (const Words& what : {Words{"--resume"}, Words{"--resume", run}}) {
    auto rank = std::make_unique<HeldLock>(run);
    auto resuming = front.start(kTinyRun + what);
    ::usleep(300'000);  // it would have been refused by then
    rank.reset();
    const Outcome outcome = resuming.wait(30.0);
    EXPECT_EQ(outcome.code, 75) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "waits for process 4711")) << outcome.err;
    EXPECT_TRUE(last_request(front).resume);
    EXPECT_EQ(run_directory(front), run);
    EXPECT_EQ(read_file(run + "/LOCK"), "4710") << "as it was found";
  }
}

TEST(TrainResume, ABadNeighbourKeepsNoRunFromGoingOn) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  std::filesystem::create_directories(front.file("runs/tiny-folder/manifest.json"));
  make_directories(front.file("runs/tiny-pipe"));
  ASSERT_EQ(::mkfifo(front.file("runs/tiny-pipe/manifest.json").c_str(), 0644), 0);
  ASSERT_EQ(::mkfifo(front.file("runs/tiny-pipe/LOCK").c_str(), 0644), 0);
  for (const char* word : {"auto", "latest", "tiny"}) {
    const Outcome outcome = front.run(kTinyRun + Words{std::string("--resume=") + word});
    EXPECT_EQ(outcome.code, 75) << word << outcome.err;
    EXPECT_EQ(run_directory(front), run) << word;
    EXPECT_TRUE(contains(outcome.err, "skipped runs/tiny-folder")) << word << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "skipped runs/tiny-pipe")) << word << outcome.err;
  }
}

TEST(TrainResume, ARunThatIsALinkGoesOn) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  const std::string name = std::filesystem::path(run).filename();
  make_directories(front.file("disk"));
  std::filesystem::rename(run, front.file("disk/" + name));
  std::filesystem::create_symlink(front.file("disk/" + name), run);
  for (const std::string& word : {std::string("auto"), std::string("latest"), std::string("tiny"), name,
                                  "runs/" + name + "/checkpoints/step-00000001"}) {
    write_file_atomic(front.file("disk/" + name + "/checkpoints/step-00000001/index.json"), "");
    const Outcome outcome = front.run(kTinyRun + Words{"--resume=" + word});
    EXPECT_EQ(outcome.code, 75) << word << outcome.err;
    EXPECT_TRUE(last_request(front).resume) << word;
    EXPECT_EQ(run_directory(front), front.file("disk/" + name)) << word;
  }
}

TEST(TrainResume, SaysWhatWasRemoved) {
  FrontProcess front;
  front.set_worker(recorder(0));
  EXPECT_EQ(front.run(kTinyRun + Words{"--checkpoint.every=1"}).code, 0);
  const std::string run = newest_run(front);
  EXPECT_TRUE(contains(front.run({"train", "--resume", run}).err, "was configured to save none"));
  write_file_atomic(run + "/summary.json", R"({"weights": null, "checkpoints": {"written": 3}})");
  const Outcome outcome = front.run({"train", "--resume", run});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "what it had saved has been removed")) << outcome.err;
}

TEST(TrainRun, ANameThatNoFolderCanHaveIsRefused) {
  FrontProcess front;
  front.set_worker("touch started");
  const Outcome outcome = front.run(kTinyRun + Words{"--name=" + std::string(300, 'x')});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(TrainResume, LatestIsTheRunThatGoesOn) {
  FrontProcess front;
  const std::string older = leave_unfinished_run(front);
  const std::string newer = leave_unfinished_run(front);
  EXPECT_EQ(front.run({"train", "-n", "1", "--resume", older}).code, 75);
  EXPECT_EQ(newest_run(front), older);
  EXPECT_EQ(front.run(kTinyRun + Words{"--resume=auto"}).code, 75);
  EXPECT_EQ(std::filesystem::canonical(last_request(front).run_dir), older) << "and not " << newer;
}

TEST(TrainResume, AnAttemptThatFailsIsSaidThoughTheOneBeforeLeftASummary) {
  FrontProcess front;
  const std::string run = leave_unfinished_run(front);
  write_file_atomic(run + "/summary.json", "{}");
  front.set_worker("exit 6");
  const Outcome outcome = front.run({"train", "-n", "1", "--quiet", "--resume", run});
  EXPECT_EQ(outcome.code, 6);
  EXPECT_TRUE(contains(outcome.err, "ended with code 6 (NaN or infinity)")) << outcome.err;
  EXPECT_TRUE(std::filesystem::exists(run + "/summary.attempt-1.json"));
  front.set_worker("exit 143");
  const Outcome stopped = front.run({"train", "-n", "1", "--quiet", "--resume", run});
  EXPECT_TRUE(contains(stopped.err, "'trireme train --resume runs/")) << stopped.err;
}

TEST(TrainResume, ADryRunIsOfTheRunThatGoesOn) {
  FrontProcess front;
  front.set_worker(recorder(75));
  const Words wide = {"--model.d_model=96", "--model.n_heads=3", "--train.global_batch=6"};
  EXPECT_EQ(front.run(kTinyRun + wide).code, 75);
  leave_checkpoints(front);
  const std::string run = newest_run(front);
  const std::string manifest_before = read_file(run + "/manifest.json");
  const Words dry = {"-n", "1", "--dry-run", "--json"};
  const auto expected = front.run(kTinyRun + wide + Words{"--dry-run", "--json"}).json();
  const Outcome outcome = front.run(Words{"train"} + dry + Words{"--resume", run});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json(), expected);
  EXPECT_TRUE(contains(outcome.err, "would continue runs/tiny-")) << outcome.err;
  EXPECT_EQ(read_file(run + "/manifest.json"), manifest_before);
  EXPECT_EQ(front.run(Words{"train"} + dry + Words{"--resume", "nothing"}).code, 2);
}

TEST(TrainResume, AnEmptyWordIsRefused) {
  FrontProcess front;
  front.set_worker("touch started");
  for (const Words& words : {Words{"--resume", ""}, Words{"--resume="}, Words{"--resume=", "--quiet"},
                             Words{"--resume", "", "--dry-run"}}) {
    const Outcome outcome = front.run(kTinyRun + words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "--resume has an empty value")) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
}

TEST(TrainResume, AConfigFileInItsPlaceIsPointedOut) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("run.yaml"), "train:\n  steps: 3\n");
  const Outcome outcome = front.run({"train", "-n", "1", "--resume", "run.yaml"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "put --resume last, or write --resume=auto")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

}  // namespace
}  // namespace trireme::cli
