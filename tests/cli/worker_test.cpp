// The command and its real worker, end to end: what the README tells a user to run, shortened, and what exit
// codes promise.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <numeric>
#include <thread>

#include "tests/cli/front_process.h"
#include "trireme/base/clock.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"

namespace trireme::cli {
namespace {

using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class Worker : public ::testing::Test {
 protected:
  Worker() {
    front_.use_real_worker(TRIREME_WORKER);
    front_.set("XDG_CACHE_HOME", TRIREME_TEST_CACHE);  // where the builtin corpus stays for the next test
    std::ofstream text(front_.file("text.txt"));
    for (int line = 0; line < 400; ++line)
      text << "the rowers pull " << line * 7 % 10 << " strokes in time\n";
  }

  std::string run_file(const std::string& name) const { return front_.file("runs/latest/" + name); }

  /// Steps that metrics.jsonl holds.
  std::vector<nlohmann::json> steps() const {
    std::vector<nlohmann::json> found;
    std::ifstream file(run_file("metrics.jsonl"));
    for (std::string line; std::getline(file, line);) found.push_back(nlohmann::json::parse(line));
    return found;
  }

  /// Throws std::runtime_error when `is_there` does not come true within a minute.
  template <typename Condition>
  void wait_until(Condition is_there) const {
    const double deadline = monotonic_seconds() + 60.0;
    while (!is_there()) {
      if (monotonic_seconds() > deadline) throw std::runtime_error("waited in vain");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  FrontProcess front_;
};

const Words kTiny = {"train",
                     "--device=cpu",
                     "--data.path=text.txt",
                     "--model.n_layers=2",
                     "--model.d_model=32",
                     "--data.seq_len=32",
                     "--train.global_batch=4"};

TEST_F(Worker, RunsTheFirstCommandOfTheReadme) {
  const Outcome trained =
      front_.run({"train", TRIREME_CONFIGS "/quickstart.yaml", "--device=cpu", "--train.steps=4",
                  "--optim.warmup_steps=2", "--train.val_batches=1", "--train.sample_tokens=20"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  for (const char* part :
       {"step 1/4", "step 4/4", "  val ", "done 4 steps", "weights ", "sample:\nnamespace at {"})
    EXPECT_TRUE(contains(trained.out, part)) << part << " in:\n" << trained.out;
  EXPECT_TRUE(is_utf8(trained.out));
  for (const char* part :
       {"model   gpt2 gpt-tiny, 842,496 parameters", "byte tokens", "layout  dp_shard=2 on cpu"})
    EXPECT_TRUE(contains(trained.err, part)) << part << " in:\n" << trained.err;
  const auto records = steps();
  ASSERT_EQ(records.size(), 4u);
  EXPECT_EQ(records[3]["tokens"], 4 * 16 * 128);
  EXPECT_NEAR(records[0]["loss"].get<double>(), std::log(256.0), 0.5) << "an untrained model knows nothing";
  const auto summary = read_json(run_file("summary.json"));
  EXPECT_EQ(summary["final_val_loss"], records[3]["val_loss"]);
  EXPECT_TRUE(contains(trained.out, summary["weights_digest"].get<std::string>()));
  EXPECT_EQ(read_json(run_file("manifest.json"))["exit_code"], 0);
  EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
  EXPECT_TRUE(std::filesystem::exists(run_file("logs/rank-1.log")));
}

TEST_F(Worker, GeneratesFromTheLastRun) {
  ASSERT_EQ(front_.run(kTiny + Words{"--train.steps=2", "-n", "1"}).code, 0);
  const Words command = {"generate", "latest", "--prompt", "the ", "--max-tokens", "9", "--temperature", "0"};
  const Outcome json = front_.run(command + Words{"--json"});
  ASSERT_EQ(json.code, 0) << json.err;
  EXPECT_EQ(json.json()["prompt"], "the ");
  EXPECT_EQ(json.json()["tokens"], 9);
  const Outcome text = front_.run(command);
  EXPECT_EQ(text.out, printable("the " + json.json()["text"].get<std::string>()) + "\n")
      << "greedy, so the same";
}

TEST_F(Worker, SummarySaysTheSameAsItsPrediction) {
  const Outcome outcome =
      front_.run(kTiny + Words{"--train.steps=3", "-n", "2", "--parallel.policy=zero2", "--summary"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* row : {"\nddp ", "\nzero2 ", "\nfsdp:full_shard "})
    EXPECT_TRUE(contains(outcome.out, row)) << row << outcome.out;
  const auto summary = read_json(run_file("summary.json"));
  EXPECT_EQ(summary["state_bytes"]["measured"], summary["state_bytes"]["predicted"]);
  EXPECT_EQ(summary["wire_bytes_per_step"]["measured"], summary["wire_bytes_per_step"]["predicted"]);
  EXPECT_GT(summary["activation_bytes"]["measured"], summary["activation_bytes"]["predicted"]);
  EXPECT_GT(summary["steps_per_s"], 0.0);
}

TEST_F(Worker, BenchMemoryMeasuresEveryPolicyThatIsNamed) {
  Words command = {"bench", "memory", "-n", "2", "--policies", "ddp,zero3", "--json", "--train.steps=2"};
  command.insert(command.end(), kTiny.begin() + 1, kTiny.end());
  const Outcome outcome = front_.run(command);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["state_bytes"]["measured"], row["state_bytes"]["predicted"]) << row;
    EXPECT_EQ(row["wire_bytes_per_step"]["measured"], row["wire_bytes_per_step"]["predicted"]) << row;
  }
  const auto total = [&](size_t row) { return rows[row]["state_bytes"]["measured"]["total"].get<int64_t>(); };
  EXPECT_EQ(total(0), 2 * total(1)) << "all of it is sharded, over two ranks";
}

TEST_F(Worker, PlansEveryFileOfConfigs) {
  const std::map<std::string, int64_t> published = {{"llama-1b", 1'235'814'400},
                                                    {"llama-8b", 8'030'261'248}};  // meta-llama's model cards
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(TRIREME_CONFIGS)) {
    const std::string name = file.path().stem().string();
    const Outcome shown = front_.run({"config", "show", file.path().string()});
    EXPECT_EQ(shown.code, 0) << name << shown.err;
    for (const char* ranks : {"1", "2", "4"}) {
      const Outcome plan = front_.run(
          {"train", "--config", file.path().string(), "--dry-run", "--json", "--device=cpu", "-n", ranks});
      ASSERT_EQ(plan.code, 0) << name << plan.err;
      const auto found = published.find(name);
      if (found != published.end()) {
        EXPECT_EQ(plan.json()["params"], found->second) << name;
      }
    }
    ++files;
  }
  EXPECT_GE(files, 3);
}

TEST_F(Worker, CtrlCAndSigtermKeepTheWeights) {
  for (const int number : {SIGINT, SIGTERM}) {
    auto training =
        front_.start(kTiny + Words{"--train.steps=1000000", "-n", "2", "--name", std::to_string(number)});
    wait_until([&] {
      return contains(std::filesystem::weakly_canonical(run_file("")).string(),
                      "/" + std::to_string(number) + "-") &&
             steps().size() >= 2;
    });
    training.signal(number);
    const double began = monotonic_seconds();
    const Outcome outcome = training.wait(60.0);
    EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
    EXPECT_LT(monotonic_seconds() - began, 10.0);
    EXPECT_EQ(read_json(run_file("manifest.json"))["exit_code"], 128 + number);
    EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
    EXPECT_EQ(read_json(run_file("summary.json"))["steps"], static_cast<int64_t>(steps().size()));
  }
}

/// A rank that a launcher started and whose peer never comes.
TEST_F(Worker, ASignalEndsTheWaitForOtherRanks) {
  const std::pair<const char*, const char*> variables[] = {{"RANK", "1"},
                                                           {"WORLD_SIZE", "2"},
                                                           {"LOCAL_RANK", "1"},
                                                           {"LOCAL_WORLD_SIZE", "2"},
                                                           {"MASTER_PORT", "1"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : variables) front_.set(name, value);
  auto joining = front_.start(kTiny);
  std::this_thread::sleep_for(std::chrono::seconds(4));  // the worker has loaded its libraries and waits
  joining.signal(SIGTERM);
  const double began = monotonic_seconds();
  EXPECT_EQ(joining.wait(60.0).code, 128 + SIGTERM);
  EXPECT_LT(monotonic_seconds() - began, 3.0);
}

TEST_F(Worker, ExitCodesSayWhatWentWrong) {
  const struct {
    Words more;
    int code;
    const char* says;
  } cases[] = {
      {{"--parallel.bucket_mib=1"}, 2, "parallel.bucket_mib=1"},
      {{"--train.global_batch=5"}, 2, "does not divide"},
      {{"--optim.lr=1e30", "--train.grad_clip=0"}, 6, "the gradient of transformer."},
      {{"--data.path=nowhere.txt"}, 7, "nowhere.txt"},
      {{"--model.n_layers=10000", "--model.d_model=100000", "--model.n_heads=10"},
       4,
       "memory.recompute=cheap"},
  };
  for (const auto& one : cases) {
    const Outcome outcome = front_.run(kTiny + Words{"-n", "2", "--train.steps=20"} + one.more);
    EXPECT_EQ(outcome.code, one.code) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, one.says)) << one.says << " in:\n" << outcome.err;
  }
}

/// A model of 6 GiB that fits this host, but not what the process may use.
TEST_F(Worker, OutOfHostMemoryIsExitCode4WithAdvice) {
  front_.limit_memory(int64_t{2} << 30);
  const Outcome outcome = front_.run(kTiny + Words{"-n", "1", "--train.steps=1", "--model.d_model=1024",
                                                   "--model.n_layers=32", "--model.n_heads=16"});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "the host is out of memory")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "Try, in this order: ")) << outcome.err;
}

}  // namespace
}  // namespace trireme::cli
