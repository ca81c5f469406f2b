// `train --max-restarts` with a script in the worker's place: which ends lead to another attempt, what that
// is told, and what is left in the manifest.
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "tests/cli/front_process.h"
#include "trireme/base/clock.h"
#include "trireme/base/env.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/index.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

const Words kRun = {"train",           "--device=cpu", "--name=tiny",
                    "--train.steps=9", "--quiet",      "--restart-delay=0"};

/// `n` is the number of the attempt; each leaves its request and its key behind before `then`.
std::string attempts(const std::string& then) {
  return "echo x >> tries-$RANK; n=$(wc -l < tries-$RANK)\n"
         "printf %s \"$TRIREME_REQUEST\" > request-$RANK-$n\n"
         "echo \"$TRIREME_JOB_KEY\" > key-$RANK-$n\n"
         "run=runs/latest\n" +
         then;
}

Request request_of(const FrontProcess& front, int64_t rank, int64_t attempt) {
  return request_from_json(read_file(front.file(fmt::format("request-{}-{}", rank, attempt))));
}

bool was_made(const FrontProcess& front, int64_t attempt) {
  return std::filesystem::exists(front.file(fmt::format("request-0-{}", attempt)));
}

/// A folder that says that `step` was saved; scripts copy it into the run.
void prepare_checkpoint(const FrontProcess& front, int64_t step, int64_t generation) {
  const std::string folder = front.file(fmt::format("saved/step-{:08}", step));
  make_directories(folder);
  write_file_atomic(folder + "/COMMIT.json",
                    checkpoint::format_commit(
                        {.step = step, .generation = generation, .index_bytes = 0, .index_digest = 0}));
}

/// The path of the step program in the config that an attempt's ranks were given.
std::string program_of(const FrontProcess& front, int64_t attempt) {
  return plan::load({.path = "", .text = request_of(front, 0, attempt).config, .overrides = {}},
                    Environment())
      .config.train.step_program;
}

TEST(Restart, FilesThatChangeMeanwhileAreThoseThatTheRunHasKept) {
  FrontProcess front;
  front.set_worker(
      attempts("[ $n = 2 ] && echo other > program.txt\n"
               "[ $n = 3 ] && rm program.txt\n"
               "[ $n = 4 ] && exit 0\n"
               "kill -9 $$"));
  const Words print = {"plan", "step", "--text", "--all-ranks", "--device=cpu", "--train.steps=9", "-n", "1"};
  const std::string printed = front.run(print).out;
  write_file_atomic(front.file("program.txt"), printed);
  const Outcome outcome =
      front.run(kRun + Words{"-n", "1", "--max-restarts", "3", "--train.step_program=program.txt"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string copy = front.file(request_of(front, 0, 1).run_dir + "/step_program.txt");
  for (const int64_t attempt : {1, 2}) EXPECT_EQ(program_of(front, attempt), front.file("program.txt"));
  for (const int64_t attempt : {3, 4}) EXPECT_EQ(program_of(front, attempt), copy);
  EXPECT_EQ(read_file(copy), printed);
  EXPECT_NE(outcome.err.find("has changed since the run began; using the run's copy"), std::string::npos)
      << outcome.err;
}

TEST(Restart, ARankThatIsKilledStartsAllRanksAgainInTheSameRun) {
  FrontProcess front;
  front.set_worker(
      attempts("[ $RANK = 0 ] && [ $n = 1 ] && echo '{\"step\": 4}' > $run/metrics.jsonl\n"
               "[ $RANK = 1 ] && [ $n = 1 ] && kill -9 $$\n"
               "[ $n = 1 ] && sleep 5\n"
               "exit 0"));
  const Outcome outcome = front.run(kRun + Words{"-n", "2", "--max-restarts", "1"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(request_of(front, 0, 1).resume);
  EXPECT_FALSE(was_made(front, 3));
  for (const int64_t rank : {0, 1}) {
    EXPECT_TRUE(request_of(front, rank, 2).resume) << rank;
    EXPECT_EQ(request_of(front, rank, 2).run_dir, request_of(front, 0, 1).run_dir);
  }
  EXPECT_EQ(read_file(front.file("key-0-2")), read_file(front.file("key-1-2")));
  EXPECT_NE(read_file(front.file("key-0-1")), read_file(front.file("key-0-2")))
      << "a rank of the first attempt could meet those of the second";

  const auto json = front.manifest();
  EXPECT_EQ(json["exit_code"], 0);
  ASSERT_EQ(json["attempts"].size(), 2u) << json;
  const auto& first = json["attempts"][0];
  EXPECT_EQ(first["exit_code"], 128 + SIGKILL);
  EXPECT_EQ(first["rank"], 1);
  EXPECT_EQ(first["last_step"], 4);
  EXPECT_TRUE(contains(first["cause"], "was killed by signal 9 (SIGKILL)")) << first;
  EXPECT_LE(first["ended"].get<std::string>(), json["attempts"][1]["started"].get<std::string>());
  EXPECT_EQ(json["attempts"][1]["exit_code"], 0);
  EXPECT_TRUE(contains(outcome.err, "restart 1 of 1 in 0 s: starts at step 1")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "restarted 1 time, 0 steps repeated: attempt 1: rank 1 (pid "))
      << outcome.err;
}

/// A name so long that none can be made of it by adding to it stands for a full disk.
TEST(Restart, WhatCouldNotBeWrittenOfAnAttemptIsWrittenLater) {
  FrontProcess front;
  front.set_worker(
      attempts("echo {} > $run/summary.json\n"
               "long=$(printf %0250d 0)\n"
               "[ $n = 1 ] && mv $run/manifest.json $run/$long && ln -s $long $run/manifest.json && "
               "ln -s ${long%0}1 $run/crash-1.txt && exit 3\n"
               "[ $n = 2 ] && exit 5\n"
               "rm $run/crash-1.txt && mv $run/$long $run/manifest.json\n"
               "exit 0"));
  const Outcome outcome = front.run(kRun + Words{"-n", "1", "--max-restarts", "2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "the manifest could not record how the run ended: ")) << outcome.err;
  const auto json = front.manifest();
  EXPECT_EQ(json["exit_code"], 0);
  ASSERT_EQ(json["attempts"].size(), 3u) << json;
  for (const char* summary : {"summary.json", "summary.attempt-1.json", "summary.attempt-2.json"})
    EXPECT_TRUE(std::filesystem::exists(front.file(std::string("runs/latest/") + summary))) << summary;
  const int codes[] = {3, 5, 0};
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(json["attempts"][i]["exit_code"], codes[i]) << i;
  for (const int attempt : {1, 2}) {
    const std::string report = read_file(front.file(fmt::format("runs/latest/crash-{}.txt", attempt)));
    EXPECT_TRUE(report.starts_with(fmt::format("attempt {} ended before a step: ", attempt))) << report;
    EXPECT_TRUE(contains(report, json["attempts"][static_cast<size_t>(attempt - 1)]["cause"])) << report;
  }
}

TEST(Restart, HappensOnlyWhenItIsAskedFor) {
  FrontProcess front;
  front.set_worker(attempts("kill -9 $$"));
  EXPECT_EQ(front.run(kRun + Words{"-n", "1"}).code, 128 + SIGKILL);
  EXPECT_FALSE(was_made(front, 2));
}

TEST(Restart, ABudgetThatIsUsedUpSaysEachCauseAndEndsWithTheLast) {
  FrontProcess front;
  front.set_worker(attempts("[ $n = 2 ] && exit 3\n[ $n = 3 ] && exit 5\nkill -6 $$"));
  const Outcome outcome = front.run(kRun + Words{"-n", "1", "--max-restarts", "2"});
  EXPECT_EQ(outcome.code, 5) << outcome.err;
  EXPECT_TRUE(was_made(front, 3));
  EXPECT_FALSE(was_made(front, 4));
  for (const char* part :
       {"--max-restarts 2 is used up", "attempt 1: rank 0 (pid ", "(SIGABRT)", "attempt 2: rank 0 (pid ",
        "exited with code 3 (machine or installation unusable)", "attempt 3: rank 0 (pid ",
        "exited with code 5 (lost a peer or timed out)", "'trireme train --resume runs/tiny-"})
    EXPECT_TRUE(contains(outcome.err, part)) << part << " in:\n" << outcome.err;
  EXPECT_EQ(front.manifest()["exit_code"], 5);
}

TEST(Restart, AFailureIsNamedInTheLastLinesWithTheCommandThatResumes) {
  FrontProcess front;
  prepare_checkpoint(front, 4, 1);
  front.set_worker(
      attempts("cp -r saved/* $run/checkpoints\n"
               "echo \"12:34:56 error: [train] the loss of attempt $n is NaN; lower optim.lr\" >&2; exit 6"));
  const Outcome outcome = front.run(kRun + Words{"-n", "1"});
  EXPECT_EQ(outcome.code, 6);
  const size_t error =
      outcome.err.rfind("ended with code 6 (NaN or infinity): [train] the loss of attempt 1");
  const size_t next = outcome.err.rfind("next    'trireme train --resume runs/tiny-");
  ASSERT_NE(error, std::string::npos) << outcome.err;
  ASSERT_NE(next, std::string::npos) << outcome.err;
  EXPECT_LT(error, next);
  EXPECT_EQ(front.manifest()["attempts"][0]["error"], "[train] the loss of attempt 1 is NaN; lower optim.lr");

  front.set_worker(attempts("kill -9 $$"));  // it could say nothing
  const Outcome killed = front.run(Words{"train", "-n", "1", "--resume=latest"});
  EXPECT_TRUE(contains(killed.err, "ended with code 137: rank 0 (pid ")) << killed.err;
  EXPECT_TRUE(front.manifest()["attempts"][1]["error"].is_null()) << "the log has that of the first attempt";
}

TEST(Restart, AManifestThatHasGoneKeepsNoRunFromGoingOn) {
  FrontProcess front;
  front.set_worker(
      attempts("[ $n = 3 ] && exit 0\n[ $n = 1 ] && rm $run/manifest.json\n"
               "[ $n = 2 ] && echo '{' > $run/manifest.json\nkill -9 $$"));
  const Outcome outcome = front.run(kRun + Words{"-n", "1", "--max-restarts", "3"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "made again from memory")) << outcome.err;
  const auto json = front.manifest();
  ASSERT_EQ(json["attempts"].size(), 3u);
  EXPECT_EQ(json["attempts"][0]["exit_code"], 137);
  EXPECT_EQ(json["attempts"][2]["exit_code"], 0);
  EXPECT_EQ(json["name"], "tiny");
}

TEST(Restart, ARunDirectoryThatWasMovedOrRemovedEndsTheRun) {
  for (const char* loss : {"mv $(readlink -f $run) elsewhere", "rm -r $(readlink -f $run)",
                           "d=$(readlink -f $run); rm -r $d; mkdir -p $d/checkpoints/final"}) {
    for (const char* end : {"exit 0", "kill -9 $$"}) {
      FrontProcess front;
      front.set_worker(attempts(std::string(loss) + "\n" + end));
      const Outcome outcome = front.run(kRun + Words{"-n", "1", "--max-restarts", "3"});
      EXPECT_EQ(outcome.code, 3) << loss << end << outcome.err;
      EXPECT_TRUE(contains(outcome.err, "was moved or removed")) << loss << end << outcome.err;
      EXPECT_FALSE(was_made(front, 2)) << loss << end;
    }
  }
}

TEST(Restart, WhatWouldComeAgainAndWhatWasAskedForIsNotStartedAgain) {
  for (const int code : {0, 2, 4, 6, 7, 75, 130, 143}) {
    FrontProcess front;
    front.set_worker(attempts("exit " + std::to_string(code)));
    EXPECT_EQ(front.run(kRun + Words{"-n", "1", "--max-restarts", "3"}).code, code);
    EXPECT_FALSE(was_made(front, 2)) << code;
  }
}

TEST(Restart, ACheckpointGivesTheBudgetBackOnlyWhenItIsFurtherThanAllBefore) {
  FrontProcess front;
  prepare_checkpoint(front, 2, 1);
  prepare_checkpoint(front, 1, 2);
  prepare_checkpoint(front, 4, 3);
  front.set_worker(
      attempts("[ $n = 1 ] && cp -r saved/step-00000002 $run/checkpoints\n"
               "[ $n = 2 ] && cp -r saved/step-00000001 $run/checkpoints\n"  // behind it
               "[ $n = 3 ] && cp -r saved/step-00000004 $run/checkpoints\n"
               "exit 5"));
  const Outcome outcome = front.run(kRun + Words{"-n", "1", "--max-restarts", "2"});
  EXPECT_EQ(outcome.code, 5);
  for (const char* part :
       {"restart 1 of 2 in 0 s: continues after step 2", "restart 2 of 2 in 0 s: continues after step 1",
        "restart 1 of 2 in 0 s: continues after step 4"})
    EXPECT_TRUE(contains(outcome.err, part)) << part << " in:\n" << outcome.err;
  EXPECT_TRUE(was_made(front, 5));
  EXPECT_FALSE(was_made(front, 6));
}

TEST(Restart, GoesOnFromTheCheckpointThatWasNamedUntilThereIsOneOfItsOwn) {
  FrontProcess front;
  front.set_worker("exit 75");
  EXPECT_EQ(front.run(kRun + Words{"-n", "1"}).code, 75);
  prepare_checkpoint(front, 2, 1);
  prepare_checkpoint(front, 8, 1);
  prepare_checkpoint(front, 3, 2);
  write_file_atomic(front.file("saved/step-00000002/index.json"), "");
  const std::string checkpoints = front.file("runs/latest/checkpoints");
  for (const char* name : {"/step-00000002", "/step-00000008"}) {
    make_directories(checkpoints + name);
    std::filesystem::copy(front.file("saved") + name, checkpoints + name,
                          std::filesystem::copy_options::recursive);
  }
  front.set_worker(
      attempts("[ $n = 2 ] && cp -r saved/step-00000003 $run/checkpoints\n[ $n = 3 ] || exit 5"));
  const Outcome outcome = front.run({"train", "-n", "1", "--quiet", "--restart-delay=0", "--max-restarts=2",
                                     "--resume", checkpoints + "/step-00000002"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(request_of(front, 0, 2).resume_from.ends_with("/step-00000002"));
  EXPECT_EQ(request_of(front, 0, 3).resume_from, "");
}

/// Signals that come while the command waits to start its ranks again.
TEST(Restart, ASignalEndsTheWaitForTheNextAttempt) {
  struct Case {
    int signal;
    bool saves;
    int code;
  };
  for (const Case& given : {Case{SIGTERM, false, 143}, Case{SIGTERM, true, 75}, Case{SIGINT, true, 130}}) {
    FrontProcess front;
    prepare_checkpoint(front, 2, 1);
    front.set_worker(
        attempts(std::string(given.saves ? "cp -r saved/* $run/checkpoints\n" : "") + "kill -9 $$"));
    Words words = kRun + Words{"-n", "1", "--max-restarts", "3"};
    std::ranges::replace(words, std::string("--restart-delay=0"), std::string("--restart-delay=3000"));
    auto running = front.start(words);
    const double deadline = monotonic_seconds() + 30.0;
    const std::string errors = front.file(".stderr");
    while (!(std::filesystem::exists(errors) && contains(read_file(errors), "restart 1 of 3 in 3e+03 s")) &&
           monotonic_seconds() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    running.signal(given.signal);
    const Outcome outcome = running.wait(30.0);
    EXPECT_EQ(outcome.code, given.code) << outcome.err;
    EXPECT_EQ(front.manifest()["exit_code"], given.code);
    EXPECT_FALSE(was_made(front, 2));
  }
}

TEST(Restart, ASignalToRanksThatStillLoadPreemptsARunThatHasACheckpoint) {
  const struct {
    int number;
    const char* saves;
    int code;
  } cases[] = {{SIGTERM, "cp -r saved/* $run/checkpoints\n", 75},
               {SIGTERM, "", 128 + SIGTERM},
               {SIGINT, "cp -r saved/* $run/checkpoints\n", 128 + SIGINT}};
  for (const auto& given : cases) {
    FrontProcess front;
    prepare_checkpoint(front, 2, 1);
    front.set_worker(attempts(std::string(given.saves) + "[ $n = 1 ] && kill -9 $$\n: > up; exec sleep 30"));
    auto running = front.start(kRun + Words{"-n", "1", "--max-restarts", "3"});
    const double deadline = monotonic_seconds() + 30.0;
    while (!std::filesystem::exists(front.file("up")) && monotonic_seconds() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    running.signal(given.number);
    const Outcome outcome = running.wait(30.0);
    EXPECT_EQ(outcome.code, given.code) << outcome.err;
    EXPECT_EQ(front.manifest()["exit_code"], given.code);
  }
}

TEST(Restart, UnderAnotherLauncherIsThatLaunchersAffair) {
  FrontProcess front;
  front.set_worker(attempts("exit 0"));
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"LOCAL_WORLD_SIZE", "2"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : variables) front.set(name, value);
  const Outcome refused = front.run(kRun + Words{"--max-restarts", "3"});
  EXPECT_EQ(refused.code, 2);
  for (const char* part : {"--max-restarts", "torchrun", "--resume"})
    EXPECT_TRUE(contains(refused.err, part)) << part << " in: " << refused.err;
  EXPECT_FALSE(was_made(front, 1));
  EXPECT_EQ(front.run(kRun + Words{"--max-restarts", "0"}).code, 0);
}

TEST(Restart, ImpossibleNumbersAreRefused) {
  FrontProcess front;
  front.set_worker(attempts("exit 0"));
  for (const char* word : {"--max-restarts=-1", "--max-restarts=many", "--restart-delay=-1"}) {
    const Outcome outcome = front.run({"train", "--device=cpu", "-n", "1", word});
    EXPECT_EQ(outcome.code, 2) << word << outcome.err;
  }
}

}  // namespace
}  // namespace trireme::cli
