// `train --controller` with its real worker: what it trains is what `train` trains, whatever happens.
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cli/worker_fixture.h"

namespace trireme::cli {
namespace {

/// Runs of 4 layers, so that stages of schedules that go there and back fit.
const Words kDriven = {"train",
                       "--device=cpu",
                       "--data.path=text.txt",
                       "--model.n_layers=4",
                       "--model.d_model=32",
                       "--data.seq_len=32",
                       "--train.global_batch=8",
                       "--train.steps=5",
                       "--train.grad_clip=0.5",
                       "--model.dropout=0.1",
                       "--train.sample_tokens=8"};

struct DrivenWorker : Worker {
  /// The digest of weights that a run ends with.
  std::string digest_of(const Words& words) {
    const Outcome outcome = front_.run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(contains(outcome.out, "\ndone ")) << outcome.out;
    return read_json(run_file("summary.json"))["weights_digest"];
  }

  /// The name of a process and the number of its parent.
  static std::pair<std::string, std::string> process(const std::string& pid) {
    std::string name, word;
    std::ifstream("/proc/" + pid + "/comm") >> name;
    std::ifstream status("/proc/" + pid + "/status");
    while (status >> word && word != "PPid:") {
    }
    status >> word;
    return {name, word};
  }

  /// Ranks of the run under way: workers in its folder but the one that has loaded libraries for others.
  std::vector<pid_t> ranks() const {
    namespace fs = std::filesystem;
    std::map<pid_t, pid_t> parents;
    std::error_code gone;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const auto [name, parent] = process(entry.path().filename());
      if (name == "trireme-worker" && !parent.empty() &&
          fs::read_symlink(entry.path() / "cwd", gone) == fs::canonical(front_.file(".")))
        parents[std::stoi(entry.path().filename())] = std::stoi(parent);
    }
    std::vector<pid_t> found;
    for (const auto& [pid, unused] : parents) {
      const auto is_child = [&, at = pid](const auto& other) { return other.second == at; };
      if (std::ranges::none_of(parents, is_child)) found.push_back(pid);
    }
    return found;
  }

  /// Whether the latest run has this name and a checkpoint, of which records may tell later than folders do.
  bool has_checkpoint(const std::string& name) const {
    namespace fs = std::filesystem;
    std::error_code absent;
    if (!contains(fs::read_symlink(front_.file("runs/latest"), absent).string(), name)) return false;
    for (const auto& entry : fs::directory_iterator(run_file("checkpoints"), absent)) {
      if (entry.path().filename().string().starts_with("step-")) return true;
    }
    return false;
  }

  /// Commands beside the one that is tested; each keeps the output of one.
  struct Beside : FrontProcess {
    explicit Beside(const FrontProcess& tested) {
      use_real_worker(TRIREME_WORKER);
      set("XDG_RUNTIME_DIR", tested.file("run"));
    }
  };
};

TEST_F(DrivenWorker, EndsWithTheDigestOfTrain) {
  const std::vector<Words> cases = {
      {"-n", "2", "--parallel.policy=ddp", "--train.micro_batch=2"},
      {"-n", "2", "--parallel.policy=fsdp", "--precision.compute=bf16"},
      {"-n", "4", "--parallel.policy=zero2", "--parallel.tp=2"},
      {"-n", "2", "--parallel.cp=2", "--parallel.cp_kind=ring", "--model.dropout=0"},
      {"-n", "2", "--parallel.pp=2", "--pipeline.schedule=zb_v", "--model.dropout=0"},
      {"-n", "4", "--parallel.pp=2", "--pipeline.schedule=1f1b", "--parallel.policy=zero1"},
  };
  for (const Words& one : cases) {
    const std::string alone = digest_of(kDriven + one);
    EXPECT_EQ(digest_of(kDriven + one + Words{"--controller"}), alone) << one[2] << " " << one[3];
  }
}

TEST_F(DrivenWorker, PrintsAndRecordsAsTrainDoes) {
  const Outcome outcome = front_.run(kDriven + Words{"-n", "2", "--controller", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  size_t lines = 0;
  for (const char letter : outcome.out) lines += letter == '\n';
  EXPECT_EQ(lines, 6U) << outcome.out;  // steps and the summary
  EXPECT_EQ(steps().size(), 5U);
  const nlohmann::json manifest = read_json(run_file("manifest.json"));
  EXPECT_EQ(manifest["exit_code"], 0);
  EXPECT_EQ(manifest["ranks"], 2);
  EXPECT_TRUE(std::filesystem::exists(run_file("logs/rank-1.log")));
}

TEST_F(DrivenWorker, AKilledWorkerIsReplacedAndTheRunGoesOn) {
  const Words words = kDriven + Words{"-n", "2", "--train.steps=800", "--checkpoint.every=50"};
  const std::string unfailed = digest_of(words);
  auto training = front_.start(
      words + Words{"--name=killed", "--controller", "--max-restarts", "1", "--restart-delay", "0"});
  wait_until([&] { return has_checkpoint("killed"); });
  const std::vector<pid_t> victims = ranks();
  ASSERT_EQ(victims.size(), 2u);
  ASSERT_EQ(::kill(victims[1], SIGKILL), 0);
  const Outcome outcome = training.wait(120.0);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "was killed by signal 9")) << outcome.err;
  const nlohmann::json summary = read_json(run_file("summary.json"));
  EXPECT_EQ(summary["weights_digest"], unfailed);
  EXPECT_GE(summary["resumed_at"].get<int>(), 50);
}

TEST_F(DrivenWorker, CtrlCKeepsTheWeightsAndTheRunGoesOn) {
  const Words words = kDriven + Words{"-n", "2", "--train.steps=800", "--checkpoint.every=1000"};
  const std::string unfailed = digest_of(words);
  auto training = front_.start(words + Words{"--controller"});
  wait_until([&] { return steps().size() >= 3 && steps().size() < 400; });
  training.signal(SIGINT);
  const Outcome outcome = training.wait(60.0);
  EXPECT_EQ(outcome.code, 128 + SIGINT) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "\ninterrupted by SIGINT after step ")) << outcome.out;
  const Outcome again = front_.run({"train", "-n", "2", "--controller", "--resume=latest"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(read_json(run_file("summary.json"))["weights_digest"], unfailed);
}

TEST_F(DrivenWorker, WorkersOfAServerTakeOneRunAfterTheOther) {
  std::filesystem::create_directory(front_.file("run"));
  front_.set("XDG_RUNTIME_DIR", front_.file("run"));
  const std::string socket = front_.file("run/own/s");
  const Beside of_server(front_), first(front_), second(front_);
  auto server = of_server.start({"serve", "-n", "2", "--socket", socket});
  const Words there = {"--socket", socket};
  wait_until([&] { return std::filesystem::exists(socket); });
  const Outcome early = front_.run(kDriven + Words{"--controller"} + there);
  EXPECT_EQ(early.code, 5);
  EXPECT_TRUE(contains(early.err, "has 0 of 2 workers; start the others with 'trireme worker'")) << early.err;

  auto one = first.start(Words{"worker", "--device", "cpu"} + there);
  auto other = second.start(Words{"worker", "--device", "cpu"} + there);
  wait_until([&] { return contains(front_.run(Words{"ps"} + there).out, "no client"); });
  const std::string fsdp = digest_of(kDriven + Words{"-n", "2"}),
                    ddp = digest_of(kDriven + Words{"-n", "2", "--parallel.policy=ddp", "--seed=7"});
  const Words driven = kDriven + Words{"--controller"} + there;
  EXPECT_EQ(digest_of(driven), fsdp);
  EXPECT_EQ(digest_of(driven + Words{"--parallel.policy=ddp", "--seed=7"}), ddp);
  const Outcome wrong = front_.run(driven + Words{"-n", "3"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_TRUE(contains(wrong.err, "has 2 workers; remove -n")) << wrong.err;

  auto stopped = front_.start(driven + Words{"--train.steps=1000000"});
  wait_until([&] { return !steps().empty() && steps().size() != 5; });
  stopped.signal(SIGTERM);
  const Outcome outcome = stopped.wait(60.0);
  EXPECT_EQ(outcome.code, 128 + SIGTERM) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "\ninterrupted by SIGTERM after step ")) << outcome.out;
  EXPECT_EQ(digest_of(driven), fsdp);

  const Outcome elsewhere = front_.run(driven + Words{"--device=cuda"});
  EXPECT_EQ(elsewhere.code, 2);
  EXPECT_TRUE(contains(elsewhere.err, "compute on the CPU; set device to auto")) << elsewhere.err;
  EXPECT_LT(read_json(run_file("summary.json"))["seconds_to_first_step"], 2.0) << "that of the process";

  // The learning rate makes the loss no number, which ends the workers.
  const Outcome failed = front_.run(driven + Words{"--optim.lr=1e30", "--train.grad_clip=0"});
  EXPECT_EQ(failed.code, 6) << failed.err;
  EXPECT_TRUE(contains(failed.err, "[train")) << failed.err;
  server.signal(SIGINT);
  EXPECT_EQ(server.wait(20.0).code, 0);
}

TEST_F(DrivenWorker, ARunWhoseClientWasKilledCanGoOn) {
  std::filesystem::create_directory(front_.file("run"));
  front_.set("XDG_RUNTIME_DIR", front_.file("run"));
  const Words words = kDriven + Words{"-n", "2", "--train.steps=800", "--checkpoint.every=1000"};
  const std::string unfailed = digest_of(words);
  const std::string socket = front_.file("run/own/s");
  const Beside of_server(front_), first(front_), second(front_);
  auto server = of_server.start({"serve", "-n", "2", "--socket", socket});
  const Words there = {"--socket", socket};
  wait_until([&] { return std::filesystem::exists(socket); });
  auto one = first.start(Words{"worker", "--device", "cpu"} + there);
  auto other = second.start(Words{"worker", "--device", "cpu"} + there);
  wait_until([&] { return contains(front_.run(Words{"ps"} + there).out, "no client"); });
  {
    auto training = front_.start(words + Words{"--controller"} + there);
    wait_until([&] { return steps().size() >= 3 && steps().size() < 400; });
  }  // killed
  wait_until([&] { return contains(front_.run(Words{"ps"} + there).out, "no client"); });
  const Outcome again = front_.run(Words{"train", "--controller", "--resume=latest"} + there);
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_FALSE(contains(again.err, "starts a new run")) << again.err;
  EXPECT_EQ(read_json(run_file("summary.json"))["weights_digest"], unfailed);
}

TEST_F(DrivenWorker, WordsThatCannotBeAreRefused) {
  const Outcome no_server = front_.run(kDriven + Words{"--controller", "-p", "23999"});
  EXPECT_EQ(no_server.code, 5) << no_server.err;
  const Outcome no_controller = front_.run(kDriven + Words{"-p", "23999"});
  EXPECT_EQ(no_controller.code, 2) << no_controller.err;
  become_rank(0, 1, 0);
  const Outcome under_torchrun = front_.run(kDriven + Words{"--controller"});
  EXPECT_EQ(under_torchrun.code, 2);
  EXPECT_TRUE(contains(under_torchrun.err, "started by torchrun; remove it")) << under_torchrun.err;
}

/// The server tells its workers that their client has gone before it ends.
TEST_F(DrivenWorker, ARunWhoseServerIsStoppedCanGoOn) {
  std::filesystem::create_directory(front_.file("run"));
  front_.set("XDG_RUNTIME_DIR", front_.file("run"));
  const std::string socket = front_.file("run/own/s");
  const Beside of_server(front_), first(front_);
  auto server = of_server.start({"serve", "-n", "1", "--socket", socket});
  const Words there = {"--socket", socket};
  wait_until([&] { return std::filesystem::exists(socket); });
  auto worker = first.start(Words{"worker", "--device", "cpu"} + there);
  wait_until([&] { return contains(front_.run(Words{"ps"} + there).out, "no client"); });
  auto training = front_.start(
      kDriven + Words{"--train.steps=1000000", "--checkpoint.every=100000", "--controller"} + there);
  wait_until([&] { return steps().size() >= 3; });
  server.signal(SIGINT);
  EXPECT_EQ(server.wait(60.0).code, 0);
  EXPECT_EQ(worker.wait(60.0).code, 0);
  EXPECT_EQ(training.wait(60.0).code, 5);
  const Outcome list = front_.run({"ckpt", "list", "latest"});
  EXPECT_TRUE(contains(list.out, "step-")) << list.out << list.err;
}

}  // namespace
}  // namespace trireme::cli
