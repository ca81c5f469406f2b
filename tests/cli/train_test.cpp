// `train` with a script in the worker's place: what the front command hands over, and what it makes of the
// end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "trireme/base/env.h"
#include "trireme/base/text.h"
#include "trireme/cli/request.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

/// A worker that leaves its request and its environment behind and ends with code `code`.
std::string recorder(int code) {
  return "printf %s \"$TRIREME_REQUEST\" > request-${RANK:-none}\n"
         "env > env-${RANK:-none}\n"
         "echo verb $1\n"
         "exit " +
         std::to_string(code);
}

TEST(TrainRun, StartsTwoCpuRanksWithOneRequest) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Outcome outcome = front.run({"train", "--device=cpu", "--train.steps=3", "--name=tiny"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "verb train\n") << "stdout is rank 0's alone";
  EXPECT_EQ(read_file(front.file("request-0")), read_file(front.file("request-1")));
  EXPECT_FALSE(std::filesystem::exists(front.file("request-2")));

  const Request request = request_from_json(read_file(front.file("request-0")));
  EXPECT_EQ(request.verb, "train");
  EXPECT_EQ(request.command, "trireme train --device=cpu --train.steps=3 --name=tiny");
  EXPECT_TRUE(std::filesystem::equivalent(front.file(request.run_dir), front.file("runs/latest")));
  const auto config = plan::load({.path = "", .text = request.config, .overrides = {}}, Environment()).config;
  EXPECT_EQ(config.train.steps, 3);
  EXPECT_EQ(config.device, plan::Device::kCpu);
}

TEST(TrainRun, LeavesACompleteRunDirectory) {
  FrontProcess front;
  front.set_worker(recorder(0));
  ASSERT_EQ(front.run({"train", "-n", "3", "--train.global_batch=6", "--device=cpu"}).code, 0);
  const auto json = front.manifest();
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["mesh"], "dp_shard=3");
  EXPECT_EQ(json["device"], "cpu");
  EXPECT_EQ(json["exit_code"], 0);
  EXPECT_TRUE(json["ended"].is_string());
  EXPECT_EQ(read_file(front.file("runs/latest/config.yaml")),
            request_from_json(read_file(front.file("request-0"))).config);
  for (const char* log : {"rank-0.log", "rank-1.log", "rank-2.log"}) {
    EXPECT_EQ(read_file(front.file("runs/latest/logs/") + log), "verb train\n") << log;
  }
}

TEST(TrainRun, ReturnsAndRecordsTheExitCodeOfItsRanks) {
  for (const int code : {1, 4, 5, 6, 7, 75}) {
    FrontProcess front;
    front.set_worker(recorder(code));
    EXPECT_EQ(front.run({"train", "--device=cpu", "-n", "1"}).code, code);
    EXPECT_EQ(front.manifest()["exit_code"], code);
  }
}

Request last_request(const FrontProcess& front) {
  return request_from_json(read_file(front.file("request-0")));
}

/// Run directories may be named from where the front command runs.
std::string run_directory(const FrontProcess& front) {
  const std::filesystem::path named(last_request(front).run_dir);
  return std::filesystem::canonical(named.is_absolute() ? named.string() : front.file(named));
}

/// What the first save leaves in the newest run.
void leave_checkpoints(const FrontProcess& front) {
  make_directories(front.file("runs/latest/checkpoints"));
  write_file_atomic(front.file("runs/latest/checkpoints/GENERATION"), "1\n");
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
    EXPECT_TRUE(contains(outcome.err, "end it first")) << outcome.err;
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
  EXPECT_TRUE(contains(outcome.err, "would go on in runs/tiny-")) << outcome.err;
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
    EXPECT_TRUE(contains(outcome.err, "--resume was given an empty word")) << outcome.err;
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

TEST(TrainRun, FindsItsFolderByOptionThenVariableThenDefault) {
  FrontProcess front;
  front.set_worker(recorder(0));
  front.run({"train", "--device=cpu", "-n", "1"});
  EXPECT_TRUE(std::filesystem::exists(front.file("runs/latest")));
  front.set("TRIREME_RUN_DIR", front.file("by-variable"));
  front.run({"train", "--device=cpu", "-n", "1"});
  EXPECT_TRUE(std::filesystem::exists(front.file("by-variable/latest")));
  front.run({"train", "--device=cpu", "-n", "1", "--run-dir", "by-option"});
  EXPECT_TRUE(std::filesystem::exists(front.file("by-option/latest")));
}

// The request holds the resolved config: a variable of lower precedence must not reach a worker and win
// there.
TEST(TrainRun, WorkersDoNotSeeConfigVariables) {
  FrontProcess front;
  front.set_worker(recorder(0));
  front.set("TRIREME__TRAIN__STEPS", "5");
  ASSERT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--train.steps=9"}).code, 0);
  EXPECT_FALSE(contains(read_file(front.file("env-0")), "TRIREME__TRAIN__STEPS"));
  EXPECT_TRUE(contains(request_from_json(read_file(front.file("request-0"))).config, "steps: 9"));
}

TEST(TrainRun, WithoutAWorkerSaysHowToGetOne) {
  const FrontProcess front;
  const Outcome outcome = front.run({"train", "--device=cpu"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.err, "trireme-worker")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs"))) << "a run that cannot start leaves nothing";
}

TEST(TrainRun, AFolderThatCannotBeMadeIsAnEnvironmentError) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("taken"), "x");
  const Outcome outcome = front.run({"train", "--device=cpu", "--run-dir=taken"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "taken")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

/// Everything on stderr, without the time at the start of each line.
std::vector<std::string> said(const Outcome& outcome) {
  std::vector<std::string> lines = split(outcome.err, '\n');
  for (std::string& line : lines) {
    if (line.size() > 9 && line[2] == ':' && line[5] == ':') line.erase(0, 9);
  }
  if (lines.back().empty()) lines.pop_back();
  return lines;
}

TEST(TrainRun, SaysAtTheStartWhereTheRunIs) {
  FrontProcess front;
  front.set_worker(recorder(0));
  const Outcome outcome = front.run({"train", "--device=cpu", "-n", "1", "--name=tiny"});
  const std::string run = std::filesystem::read_symlink(front.file("runs/latest")).string();
  ASSERT_EQ(said(outcome).size(), 1u) << outcome.err;
  EXPECT_EQ(said(outcome)[0],
            "run     runs/" + run + ", weights at the end in checkpoints/final/model.safetensors");
  EXPECT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--quiet"}).err, "");
}

TEST(TrainRun, SaysWhereARunIsThatEndedWithoutASummary) {
  FrontProcess front;
  front.set_worker("exit 6");
  const Outcome failed = front.run({"train", "--device=cpu", "-n", "1", "--quiet"});
  const std::string run = "runs/" + std::filesystem::read_symlink(front.file("runs/latest")).string();
  EXPECT_EQ(said(failed).back(),
            "run     " + run + " ended with code 6 (NaN or infinity); its logs are in " + run + "/logs");
  front.set_worker("exit 130");
  const Outcome stopped = front.run({"train", "--device=cpu", "-n", "1", "--quiet"});
  EXPECT_TRUE(contains(stopped.err, "was stopped before it had weights to keep; 'trireme train runs/"))
      << stopped.err;
}

struct BadPath {
  std::string path;
  std::string says;
};

TEST(TrainData, APathWithoutTextIsAConfigErrorBeforeAnythingStarts) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("empty.txt"), "");
  make_directories(front.file("folder"));
  const BadPath paths[] = {{"nowhere.txt", "there is no " + front.file("nowhere.txt")},
                           {"empty.txt", "holds no text"},
                           {"folder", "holds no text"},
                           {"/dev/null", "neither a file nor a folder"}};
  for (const BadPath& path : paths) {
    for (const char* dry : {"--quiet", "--dry-run"}) {
      const Outcome outcome =
          front.run({"train", "--device=cpu", "-n", "2", "--data.path=" + path.path, dry});
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      EXPECT_EQ(outcome.out, "");
      EXPECT_EQ(said(outcome).size(), 1u) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, path.says)) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, "set data.path to a text file")) << outcome.err;
    }
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
}

TEST(TrainData, ARelativePathIsKeptAsAnAbsoluteOne) {
  FrontProcess front;
  front.set_worker(recorder(0));
  write_file_atomic(front.file("text.txt"), "text");
  ASSERT_EQ(front.run({"train", "--device=cpu", "-n", "1", "--data.path=./text.txt"}).code, 0);
  const auto config = plan::load({.path = front.file("runs/latest/config.yaml")}, Environment()).config;
  EXPECT_EQ(config.data.path, front.file("text.txt"));
}

TEST(TrainData, APathThatIsMeantFromTheConfigFileIsPointedOut) {
  FrontProcess front;
  make_directories(front.file("mine"));
  write_file_atomic(front.file("mine/text.txt"), "text");
  write_file_atomic(front.file("mine/run.yaml"), "data:\n  path: text.txt\n");
  const Outcome outcome = front.run({"train", "mine/run.yaml", "--device=cpu", "--dry-run"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "beside the config file there is " + front.file("mine/text.txt")))
      << outcome.err;
}

/// A front command that torchrun started as rank 1 of 2.
void pretend_torchrun(FrontProcess& front) {
  const std::pair<const char*, const char*> variables[] = {{"RANK", "1"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "1"},
                                                           {"LOCAL_WORLD_SIZE", "2"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : variables) front.set(name, value);
}

TEST(TrainJoin, BecomesTheRankThatALauncherAskedFor) {
  FrontProcess front;
  front.set_worker(recorder(6));
  pretend_torchrun(front);
  const Outcome outcome = front.run({"train", "--device=cpu"});
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  const Request request = request_from_json(read_file(front.file("request-1")));
  EXPECT_EQ(request.run_dir, "") << "rank 0 makes it";
  EXPECT_EQ(request.runs_root, "runs");
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("request-0"))) << "no ranks of its own";
}

TEST(TrainJoin, FiveVariablesByHandAreEnough) {
  FrontProcess front;
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"}};
  for (const auto& [name, value] : variables) front.set(name, value);
  const Outcome outcome = front.run({"train", "--device=cpu", "--dry-run"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "a rank x 1 on ")) << outcome.out;
}

TEST(TrainJoin, ChecksTheBatchAgainstTheWorldItJoins) {
  FrontProcess front;
  front.set_worker(recorder(0));
  pretend_torchrun(front);
  front.set("LOCAL_RANK", "0");  // the first of its host
  EXPECT_EQ(front.run({"train", "--device=cpu", "--train.global_batch=7"}).code, 2);
  const Outcome clash = front.run({"train", "--device=cpu", "-n", "4"});
  EXPECT_EQ(clash.code, 2);
  EXPECT_TRUE(contains(clash.err, "-n 4")) << clash.err;
  EXPECT_TRUE(contains(clash.err, "torchrun")) << clash.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("request-1")));
}

TEST(TrainJoin, TheFirstRankOfAHostSpeaksForAll) {
  FrontProcess front;
  front.set_worker(recorder(0));
  pretend_torchrun(front);
  const std::vector<std::string> command = {"train", "--device=cpu", "--data.path=nowhere.txt"};
  const Outcome second = front.run(command);
  EXPECT_EQ(second.code, 2);
  EXPECT_EQ(second.err, "");
  front.set("RANK", "0");
  front.set("LOCAL_RANK", "0");
  const Outcome first = front.run(command);
  EXPECT_EQ(first.code, 2);
  EXPECT_TRUE(contains(first.err, "nowhere.txt")) << first.err;
}

TEST(TrainPolicy, ALabelIsTakenWhereverAPolicyIs) {
  FrontProcess front;
  front.set_worker(recorder(0));
  write_file_atomic(front.file("run.yaml"), "parallel:\n  policy: fsdp:no_shard\n");
  const Outcome by_file = front.run({"train", "run.yaml", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_file.out, "fsdp:no_shard: ")) << by_file.out << by_file.err;
  const Outcome by_option =
      front.run({"train", "run.yaml", "--parallel.policy=fsdp:shard_grad_op", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_option.out, "fsdp:shard_grad_op: ")) << by_option.out << by_option.err;
  front.set("TRIREME__PARALLEL__POLICY", "fsdp:full_shard");
  const Outcome by_variable = front.run({"train", "run.yaml", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_variable.out, "fsdp:full_shard: ")) << by_variable.out << by_variable.err;
}

TEST(TrainDryRun, ARunThatDoesNotFitEndsWithCode4AndSaysByHowMuch) {
  FrontProcess front;
  front.set_worker("touch started");
  const std::vector<std::string> command = {"train", "--device=cpu",           "-n",
                                            "2",     "--model.n_layers=10000", "--model.d_model=8192"};
  auto dry = command;
  dry.push_back("--dry-run");
  const Outcome plan = front.run(dry);
  EXPECT_EQ(plan.code, 4) << plan.err;
  EXPECT_TRUE(contains(plan.out, "memory       does not fit: ")) << plan.out;
  EXPECT_TRUE(contains(plan.out, " TiB a rank x 2 on ")) << plan.out;
  EXPECT_TRUE(contains(plan.err, "Try, in this order and together: ")) << plan.err;
  dry.push_back("--json");
  EXPECT_EQ(front.run(dry).json()["memory"]["fits"], false);
  const Outcome real = front.run(command);
  EXPECT_EQ(real.code, 4) << real.err;
  EXPECT_TRUE(contains(real.err, "does not fit: ")) << real.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
}

TEST(TrainDryRun, NamesWhatAConfigHardlyMeans) {
  FrontProcess front;
  const Outcome outcome =
      front.run({"train", "--dry-run", "--device=cpu", "--model.vocab_size=50257", "--profile=2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out,
                       "note         byte tokens use 256 of model.vocab_size=50,257 rows; "
                       "model.vocab_size=256 saves 6.40M parameters\n"))
      << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "note         train.profile_steps=2 without a GPU")) << outcome.out;
}

TEST(TrainDryRun, OfAPipelineShowsItsStagesAndTheMemoryOfEachRank) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words command = {"train", "--dry-run",       "--device=cpu",         "-n",
                         "2",     "--parallel.pp=2", "--pipeline.split=3,1", "--pipeline.micro_batches=4"};
  Words json_command = command;
  json_command.push_back("--json");
  const auto pipeline = front.run(json_command).json()["pipeline"];
  EXPECT_EQ(pipeline["schedule"], "1f1b");
  EXPECT_EQ(pipeline["micro_batches"], 4);
  const auto peaks = pipeline["peak_bytes_by_pp_rank"];
  ASSERT_EQ(peaks.size(), 2u);
  const int64_t made = 4 * 128 * 128 * 4;  // by the first stage
  EXPECT_EQ(peaks[0]["activations"], 6 * peaks[1]["activations"].get<int64_t>() + 2 * made)
      << "three blocks of two micro-batches, beside one of one";
  EXPECT_EQ(peaks[0]["logits"], 0);
  const std::string text = front.run(command).out;
  for (const char* words : {"1f1b, 2 stages of 3, 1 blocks", "pp rank 0", "pp rank 1", "received"})
    EXPECT_TRUE(contains(text, words)) << words << " in " << text;
}

TEST(TrainDryRun, RefusesPipelinesThatCannotBeWithCode2AndTheFix) {
  const FrontProcess front;
  const auto refusal = [&](const Words& more) {
    Words words = {"train", "--dry-run", "--device=cpu"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    return outcome.err;
  };
  EXPECT_TRUE(contains(refusal({"-n", "3", "--parallel.pp=2"}), "does not divide the world size 3"));
  EXPECT_TRUE(contains(
      refusal({"-n", "2", "--parallel.pp=2", "--pipeline.schedule=dualpipe", "--pipeline.micro_batches=2"}),
      "at least 4"));
  EXPECT_TRUE(
      contains(refusal({"-n", "2", "--parallel.pp=2", "--pipeline.file=none.csv"}), "cannot be read"));
}

TEST(TrainDryRun, PrintsThePlanAndStartsNothing) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words command = {"train",
                         "--dry-run",
                         "--device=cpu",
                         "-n",
                         "4",
                         "--model.preset=gpt2-124m",
                         "--data.tokenizer=byte",
                         "--train.global_batch=32",
                         "--train.micro_batch=2",
                         "--parallel.policy=zero2"};
  Words json_command = command;
  json_command.push_back("--json");
  const auto json = front.run(json_command).json();
  const int64_t params = 124439808;  // GPT-2 small as published
  EXPECT_EQ(json["params"], params);
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["batch"]["accumulation"], 4);  // 32 = 2 * 4 * 4
  EXPECT_EQ(json["state_bytes_per_rank"]["parameters"], 4 * params);
  // fp32, so no master beside the parameters; these layers leave no padding.
  EXPECT_EQ(json["state_bytes_per_rank"]["gradients"], 4 * (params / 4));
  EXPECT_EQ(json["state_bytes_per_rank"]["optimizer"], 8 * (params / 4));
  const auto peak = json["peak_bytes_per_rank"];
  EXPECT_EQ(peak["state"], json["state_bytes_per_rank"]["total"]);
  EXPECT_EQ(peak["logits"], 2 * 128 * 50257 * 4);  // micro-batch x data.seq_len x vocabulary, fp32
  EXPECT_GT(peak["activations"], 0);
  EXPECT_EQ(peak["total"], peak["state"].get<int64_t>() + peak["gathered"].get<int64_t>() +
                               peak["activations"].get<int64_t>() + peak["logits"].get<int64_t>() +
                               peak["process"].get<int64_t>());

  const Outcome text = front.run(command);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "124,439,808 parameters")) << text.out;
  EXPECT_TRUE(contains(text.out, "32 sequences = 2 micro-batch x 4 accumulation x 4 data-parallel ranks"))
      << text.out;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

}  // namespace
}  // namespace trireme::cli
