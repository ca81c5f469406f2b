// The command and its real worker, end to end: what the README tells a user to run, shortened, and what exit
// codes promise.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <fstream>
#include <numeric>
#include <optional>
#include <thread>

#include "tests/cli/front_process.h"
#include "trireme/base/clock.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/request.h"
#include "trireme/launch/listen.h"

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

  /// What is started next is the second of two ranks of a launcher whose first never answers.
  void lose_peers() {
    const launch::ListenSocket& first = first_rank_.emplace(launch::listen_on_loopback());
    const std::pair<const char*, const char*> variables[] = {{"RANK", "1"},
                                                             {"WORLD_SIZE", "2"},
                                                             {"LOCAL_RANK", "1"},
                                                             {"LOCAL_WORLD_SIZE", "2"},
                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                             {"TORCHELASTIC_RUN_ID", "x"}};
    for (const auto& [name, value] : variables) front_.set(name, value);
    front_.set("MASTER_PORT", std::to_string(first.port));
  }

  /// The worker has loaded its libraries, and waits for the first rank.
  void wait_until_it_joins() const {
    pollfd connection{.fd = first_rank_->fd.get(), .events = POLLIN, .revents = 0};
    wait_until([&] { return ::poll(&connection, 1, 0) > 0; });
  }

  FrontProcess front_;
  std::optional<launch::ListenSocket> first_rank_;
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

TEST_F(Worker, AReportHasTheFiguresOfItsRun) {
  // 7 steps after the warm-up: the middle one is the same whether times or rates are sorted.
  ASSERT_EQ(front_.run(kTiny + Words{"--train.steps=13", "-n", "2", "--train.val_every=5"}).code, 0);
  const Outcome outcome = front_.run({"report", "latest", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  const auto figures = outcome.json()["runs"][0], summary = read_json(run_file("summary.json"));
  EXPECT_EQ(figures["state"], "finished");
  EXPECT_EQ(figures["steps"], 13);
  EXPECT_EQ(figures["loss"], summary["final_loss"]);
  EXPECT_EQ(figures["val_loss"], summary["final_val_loss"]);
  EXPECT_EQ(figures["weights_digest"], summary["weights_digest"]);
  const double rate = summary["tokens_per_s"];
  EXPECT_NEAR(figures["tokens_per_s"].get<double>(), rate, 1e-6 * rate);
  EXPECT_TRUE(figures["problems"].empty()) << figures["problems"];
  const std::string page = read_file(run_file("report.html"));
  for (const char* part :
       {"validation loss", "Exposed communication", "--train.steps", "dp_shard=2", "Memory by part"})
    EXPECT_TRUE(contains(page, part)) << part;
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

TEST_F(Worker, BenchSpeedMeasuresPoliciesByMicroBatchesAndRecommendsOne) {
  const auto bench = [&](const Words& more) {
    Words command =
        Words{"bench", "speed", "-n", "2", "--policies", "ddp,fsdp", "--steps", "6", "--rounds", "2"} + more;
    command.insert(command.end(), kTiny.begin() + 1, kTiny.end());
    return front_.run(command);
  };
  const Outcome json = bench({"--json"});
  ASSERT_EQ(json.code, 0) << json.err;
  const auto rows = json.json()["rows"];
  ASSERT_EQ(rows.size(), 4u) << "2 policies x micro-batches 2 and 1: " << rows;
  for (const auto& row : rows) {
    EXPECT_EQ(row["step_ms"].size(), 2u * (6 - 2)) << "two rounds, each without its two steps of warm-up";
    // Two rounds of four steps: what lies between the rounds is what two runs differ by.
    const auto speed_of_round = [&](size_t round) {
      std::vector<double> ms = row["step_ms"];
      std::sort(ms.begin() + 4 * round, ms.begin() + 4 * round + 4);
      return 1e3 * 4 * 32 / (0.5 * (ms[4 * round + 1] + ms[4 * round + 2]));
    };
    const auto [slow, fast] = std::minmax({speed_of_round(0), speed_of_round(1)});
    EXPECT_NEAR(row["tokens_per_s_low"], slow, 1e-9 * slow) << row;
    EXPECT_NEAR(row["tokens_per_s_high"], fast, 1e-9 * fast) << row;
    EXPECT_LE(row["tokens_per_s_low"], row["tokens_per_s"]) << row;
    EXPECT_LE(row["tokens_per_s"], row["tokens_per_s_high"]) << row;
    EXPECT_GT(row["peak_bytes"], 1 << 20);
  }
  EXPECT_EQ(json.json()["tokens_per_step"], 4 * 32);

  const Outcome text = bench({"--micro-batches", "2"});
  ASSERT_EQ(text.code, 0) << text.err;
  const auto lines = split(text.out, '\n');
  EXPECT_FALSE(contains(lines[0], "95%")) << "two rounds cannot say that: " << lines[0];
  ASSERT_EQ(lines.size(), 1u + 2 + 1 + 1) << "titles, two rows, the recommendation: " << text.out;
  EXPECT_TRUE(lines[3].starts_with("recommended: --parallel.policy=")) << text.out;
  EXPECT_TRUE(contains(lines[3], " --train.micro_batch=2  (")) << text.out;
  EXPECT_EQ(bench({"--micro-batches", "3"}).code, 2) << "which divides no batch of 2 a rank";
}

TEST_F(Worker, ResultsThatStdoutDidNotTakeAreAnError) {
  Request probe;
  probe.verb = "probe";
  const std::string line = fmt::format("TRIREME_REQUEST='{}' {} >/dev/full 2>{}", to_json(probe),
                                       TRIREME_WORKER, front_.file("said"));
  EXPECT_EQ(WEXITSTATUS(std::system(line.c_str())), 3);
  EXPECT_TRUE(contains(read_file(front_.file("said")), "[base.streams]")) << read_file(front_.file("said"));
}

TEST_F(Worker, BenchCommSaysWhatItsColumnsAre) {
  const Outcome outcome = front_.run({"bench", "comm", "-n", "2", "--mib", "1", "--rounds", "1"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "\nGB/s: bytes that one rank receives")) << outcome.out;
}

TEST_F(Worker, BenchPipelineMeasuresOneModelUnderEverySchedule) {
  const Words command = {
      "bench",           "pipeline", "-n",       "2",  "--device=cpu", "--precision.compute=fp32",
      "--micro-batches", "6",        "--chunks", "3",  "--steps",      "2",
      "--warmup",        "1",        "--seq",    "16", "--schedules"};
  const Outcome outcome = front_.run(
      command + Words{"gpipe,1f1b,interleaved_1f1b,zb_h1,interleaved_zb,zb_v,dualpipe_v", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  ASSERT_EQ(rows.size(), 7u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["samples_ms"].size(), 2u) << row;
    EXPECT_EQ(row["loss"], rows[0]["loss"]) << "one order of micro-batches, so the same bits: " << row;
    EXPECT_NEAR(row["grad_norm"].get<double>(), rows[0]["grad_norm"].get<double>(), 1e-6) << row;
    // A rank sends an fp32 (T, D) for each micro-batch and each boundary between it and the other rank.
    const bool v = row["schedule"] == "zb_v" || row["schedule"] == "dualpipe_v";
    const int64_t boundaries = v ? 2 : row["stages"].get<int64_t>() - 1;
    for (const auto& sent : row["sent_bytes"]) EXPECT_EQ(sent, 6 * boundaries * 16 * 64 * 4) << row;
  }
  EXPECT_EQ(rows[2]["stages"], 6);
  EXPECT_LT(rows[1]["step_bytes"][0], rows[0]["step_bytes"][0]) << "1f1b keeps fewer activations than gpipe";
  EXPECT_NEAR(rows[1]["simulated_bubble_share"].get<double>(), 1.0 / 7.0, 1e-12);

  const Outcome text = front_.run(command + Words{"dualpipe_v,interleaved_1f1b", "--layers", "2"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "\ndualpipe_v ")) << text.out;
  EXPECT_TRUE(contains(text.out, "\ninterleaved_1f1b was left out: [plan.stages] 6 stages")) << text.out;
  EXPECT_EQ(front_.run(command + Words{"interleaved_1f1b", "--layers", "2"}).code, 2);
}

TEST_F(Worker, BenchPipelineSpreadsTheHead) {
  const Words command = {"bench",
                         "pipeline",
                         "-n",
                         "2",
                         "--device=cpu",
                         "--precision.compute=fp32",
                         "--json",
                         "--steps",
                         "1",
                         "--warmup",
                         "1",
                         "--seq",
                         "16",
                         "--schedules",
                         "1f1b,zb_v,dualpipe"};
  const auto rows = front_.run(command + Words{"--pipeline.spread_head=true"}).json()["rows"],
             plain = front_.run(command).json()["rows"];
  ASSERT_EQ(rows.size(), 3u);
  for (size_t i = 0; i < 2; ++i) {
    const double loss = plain[i]["loss"].get<double>(), norm = plain[i]["grad_norm"].get<double>();
    EXPECT_NEAR(rows[i]["loss"].get<double>(), loss, 1e-6 * loss) << rows[i];
    EXPECT_NEAR(rows[i]["grad_norm"].get<double>(), norm, 4e-6 * norm) << rows[i];
    EXPECT_EQ(rows[i]["loss"], rows[0]["loss"]) << "one order of micro-batches, so the same bits";
  }
  EXPECT_TRUE(contains(rows[2]["refused"].get<std::string>(), "a copy of each stage on two ranks"));
  EXPECT_EQ(front_.run(command + Words{"--pipeline.spread_head=true", "--model.tie_embeddings=true"}).code,
            2);
}

TEST_F(Worker, BenchPipelineSaysWhatStepsDidBesideWhatIsSimulated) {
  const std::string folder = front_.file("pictures");
  const Outcome outcome =
      front_.run({"bench", "pipeline", "-n", "2", "--device=cpu", "--micro-batches", "4", "--steps", "2",
                  "--warmup", "1", "--schedules", "1f1b,zb_v", "--timeline", folder, "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  for (const auto& row : rows) {
    const auto& report = row["report"];
    ASSERT_EQ(report["measured"]["ranks"].size(), 2u) << row;
    for (size_t rank = 0; rank < 2; ++rank) {
      const auto &measured = report["measured"]["ranks"][rank],
                 &simulated = report["simulated"]["ranks"][rank];
      double causes = 0.0;
      for (const auto& [name, seconds] : measured["idle_causes_s"].items()) causes += seconds.get<double>();
      EXPECT_NEAR(causes, measured["idle_s"].get<double>(), 1e-9) << row;
      EXPECT_EQ(measured["sent_bytes"], simulated["sent_bytes"]) << row;
      EXPECT_EQ(measured["sent_bytes"], row["sent_bytes"][rank]) << row;
      const double peak = measured["peak_activation_bytes"];
      EXPECT_GT(peak, 0.0);
      EXPECT_NEAR(simulated["peak_activation_bytes"].get<double>(), peak, 0.05 * peak) << row;
    }
    EXPECT_EQ(row["recorded_ms"].size(), 2u);
    const std::string name = row["schedule"];
    std::ifstream trace(folder + "/" + name + ".trace.json"), svg(folder + "/" + name + ".svg");
    EXPECT_GT(nlohmann::json::parse(trace)["traceEvents"].size(), 50u);
    EXPECT_NE(std::string(std::istreambuf_iterator<char>(svg), {}).find("simulated for its costs"),
              std::string::npos);
  }
}

TEST_F(Worker, BenchPipelineRunsStagesOfManyRanksOnOneForStudy) {
  front_.set("OMP_NUM_THREADS",
             "1");  // threads of one rank that wait for each other are slow on a busy machine
  const Words command = {"bench",   "pipeline", "--study",  "4", "--device=cpu", "--micro-batches", "8",
                         "--steps", "1",        "--warmup", "0", "--schedules"};
  const Outcome outcome = front_.run(command + Words{"1f1b,dualpipe", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  for (const auto& row : rows) {
    EXPECT_EQ(row["report"]["measured"]["ranks"].size(), 1u) << row;
    EXPECT_EQ(row["report"]["simulated"]["ranks"].size(), 4u) << row;
    EXPECT_NEAR(row["loss"].get<double>(), rows[0]["loss"].get<double>(), 1e-3) << row;
    EXPECT_EQ(row["sent_bytes"][0], 0) << row;
  }
  const Outcome text = front_.run(command + Words{"1f1b"});
  EXPECT_TRUE(text.out.starts_with("for study: the stages of 4 ranks on one device")) << text.out;
  EXPECT_EQ(front_.run(command + Words{"1f1b", "-n", "2"}).code, 2);
}

TEST_F(Worker, BenchPipelineSplitsRanksBetweenPipelinesAndData) {
  const Words command = {
      "bench", "pipeline",    "--device=cpu", "--micro-batches",      "4", "--steps", "1", "--warmup",
      "0",     "--schedules", "1f1b",         "--parallel.dp_shard=2"};
  const Outcome outcome = front_.run(command + Words{"-n", "4", "--json", "--parallel.policy=zero3"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["rows"][0]["stages"], 2);
  EXPECT_EQ(outcome.json()["tokens_per_step"], 2 * 4 * 32);
  const Outcome refused = front_.run(command + Words{"-n", "2"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "a multiple of 2 that is at least 4")) << refused.err;
}

TEST_F(Worker, BenchPipelineThatRefusesAllShowsNoTable) {
  const Outcome outcome = front_.run(
      {"bench", "pipeline", "-n", "2", "--device=cpu", "--micro-batches", "2", "--schedules", "dualpipe"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(outcome.out.starts_with("dualpipe was left out: ")) << outcome.out;
}

/// A worker that is stopped does not end by itself when it is asked to.
TEST_F(Worker, BenchEndsSoonWhenAWorkerIsFrozen) {
  front_.set_worker("echo frozen >> frozen.txt; kill -STOP $$");
  auto running = front_.start({"bench", "pipeline", "-n", "2", "--device=cpu"});
  wait_until([&] {
    std::ifstream file(front_.file("frozen.txt"));
    return std::distance(std::istreambuf_iterator<char>(file), {}) >= 14;
  });
  running.signal(SIGINT);
  EXPECT_NE(running.wait(20.0).code, 0);
}

TEST_F(Worker, LabTrainsOneModelInBothModes) {
  const Words command = {
      "lab", "pipeline_1f1b", "--device=cpu", "--steps", "3", "--n-stages", "2", "--hidden-dim", "64"};
  const Outcome outcome = front_.run(command + Words{"--micro-batch-target", "8", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto modes = outcome.json()["modes"];
  ASSERT_EQ(modes.size(), 2u);
  EXPECT_EQ(modes[0]["mode"], "baseline");
  EXPECT_TRUE(modes[0]["blocking_sends"]);
  EXPECT_FALSE(modes[1]["blocking_sends"]);
  EXPECT_EQ(modes[1]["micro_batch_size"], 8);
  for (size_t step = 0; step < 3; ++step) {
    const double loss = modes[0]["losses"][step];
    EXPECT_NEAR(modes[1]["losses"][step].get<double>(), loss, 1e-5 * loss) << "the same model and batches";
  }
  const Outcome text = front_.run(command + Words{"--mode", "optimized", "--micro-batch-size", "16"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "[optimized] step 3/3 loss=")) << text.out;
  EXPECT_TRUE(contains(text.out, "stage 1 utilization")) << text.out;
  EXPECT_TRUE(contains(text.out, "stage 1 max queues, forward / backward")) << text.out;
  EXPECT_TRUE(contains(text.out, "4 of 16 rows")) << text.out;
  EXPECT_FALSE(contains(text.out, "baseline")) << text.out;
}

TEST_F(Worker, LabTakesTheNamesAndKnobsOfTheRequirements) {
  front_.set("OMP_NUM_THREADS", "1");
  const Outcome windows =
      front_.run({"lab", "labs/train_distributed:dualpipe_2stages", "--device=cpu", "--steps", "1",
                  "--dual-window", "8", "--batch-size", "32", "--micro-batch-size", "2", "--json"});
  ASSERT_EQ(windows.code, 0) << windows.err;
  const auto modes = windows.json()["modes"];
  for (const auto& mode : modes) {
    EXPECT_EQ(mode["window"], 8) << mode;
    EXPECT_EQ(mode["micro_batches"], 16) << mode;
  }
  const Outcome study = front_.run({"lab", "pipeline_dualpipev.py", "--device=cpu", "--steps", "1", "--study",
                                    "--n-stages", "3", "--mode", "optimized"});
  ASSERT_EQ(study.code, 0) << study.err;
  EXPECT_TRUE(contains(study.out, "for study: the stages of 3 ranks on one device")) << study.out;
}

TEST_F(Worker, BenchSpeedGoesOnWithoutWhatDoesNotFit) {
  const Outcome outcome = front_.run({"bench", "speed", "-n", "1", "--device=cpu", "--data.path=text.txt",
                                      "--policies", "ddp", "--model.n_layers=10000", "--model.d_model=8192"});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "out of memory")) << outcome.out;
}

TEST_F(Worker, BenchMemorySaysThatFewStepsCannotTell) {
  const auto bench = [&](const char* steps) {
    Words command = {"bench", "memory", "-n", "1", "--policies", "ddp", "--json", steps};
    command.insert(command.end(), kTiny.begin() + 1, kTiny.end());
    return front_.run(command).json()["rows"][0];
  };
  EXPECT_TRUE(bench("--train.steps=4")["step_ms"].is_null());
  const auto row = bench("--train.steps=5");
  EXPECT_GT(row["step_ms"], 0.0);
  EXPECT_GT(row["baseline_bytes"], 16 << 20);
  EXPECT_GT(row["peak_bytes"], row["baseline_bytes"]);
  EXPECT_NEAR(row["peak_bytes_predicted"].get<double>(), row["peak_bytes"].get<double>(),
              0.5 * row["peak_bytes"].get<double>());
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

TEST_F(Worker, MetricsHoldTheShareOfCommunicationWhereThereIsSome) {
  for (const char* ranks : {"1", "2"}) {
    ASSERT_EQ(front_.run(kTiny + Words{"--train.steps=3", "-n", ranks}).code, 0);
    for (const auto& step : steps()) {
      if (*ranks == '1') {
        EXPECT_TRUE(step["communication_share"].is_null()) << step;
      } else {
        EXPECT_GT(step["communication_share"], 0.0) << step;
        EXPECT_LT(step["communication_share"], 1.0) << step;
      }
    }
  }
}

/// Lines of stderr without those that say what runs.
Words surprises(const Outcome& outcome) {
  Words lines;
  for (const std::string& line : split(outcome.err, '\n')) {
    const std::string text = line.size() > 9 && line[2] == ':' ? line.substr(9) : line;
    const bool usual = text.starts_with("model ") || text.starts_with("data ") ||
                       text.starts_with("layout ") || text.starts_with("run ") || text.empty();
    if (!usual) lines.push_back(text);
  }
  return lines;
}

TEST_F(Worker, OneClearLineForWhatAUserHardlyMeant) {
  std::ofstream(front_.file("small.txt")) << std::string(700, 'a');
  const struct {
    Words more;
    const char* says;
  } cases[] = {
      {{"--model.vocab_size=50257"}, "note    byte tokens use 256 of model.vocab_size=50,257 rows"},
      {{"--data.path=small.txt"},
       "warning: nothing is validated: data.val_fraction=0.02 of 700 tokens holds out"},
  };
  for (const auto& one : cases) {
    const Outcome outcome = front_.run(kTiny + Words{"-n", "1", "--train.steps=1"} + one.more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const Words lines = surprises(outcome);
    ASSERT_EQ(lines.size(), 1u) << outcome.err;
    EXPECT_TRUE(lines[0].starts_with(one.says)) << lines[0];
  }
  const Outcome profiled = front_.run(kTiny + Words{"-n", "1", "--train.steps=3", "--profile=1"});
  EXPECT_EQ(profiled.code, 0) << profiled.err;
  const Words lines = surprises(profiled);
  ASSERT_EQ(lines.size(), 2u) << profiled.err;
  EXPECT_TRUE(contains(lines[0], "without a GPU traces CPU operators")) << lines[0];
  EXPECT_TRUE(contains(lines[1], "traces/rank-0.json")) << lines[1];
}

/// Ranks that find their text gone say so once, with the code of a config error.
TEST_F(Worker, TextThatVanishesIsOneMessageFromOneRank) {
  front_.set_worker("rm -f text.txt\nexec " TRIREME_WORKER " \"$@\"");
  const Outcome outcome = front_.run(kTiny + Words{"-n", "2", "--train.steps=2"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  const Words lines = surprises(outcome);
  ASSERT_EQ(lines.size(), 1u) << outcome.err;
  EXPECT_TRUE(lines[0].starts_with("error: [data.source] cannot read ")) << lines[0];
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
      if (name == "pipeline" && ranks == std::string("1")) {
        EXPECT_EQ(plan.code, 2) << "two stages have no place: " << plan.err;
        continue;
      }
      ASSERT_EQ(plan.code, plan.json()["memory"]["fits"] ? 0 : 4) << name << plan.err;
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
    training.signal(number);  // the same request
    const double began = monotonic_seconds();
    const Outcome outcome = training.wait(60.0);
    EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "stopping after this step; again to abort now")) << outcome.err;
    const std::string run = "runs/" + std::filesystem::read_symlink(front_.file("runs/latest")).string();
    const char* const name = number == SIGINT ? "SIGINT" : "SIGTERM";
    for (const std::string& part :
         {fmt::format("\ninterrupted by {} after step {} of 1000000, in ", name, steps().size()),
          "\nweights " + run + "/checkpoints/final/model.safetensors\n",
          "'trireme train " + run + "/config.yaml' trains again"})
      EXPECT_TRUE(contains(outcome.out, part)) << part << " in:\n" << outcome.out;
    EXPECT_LT(monotonic_seconds() - began, 10.0);
    EXPECT_EQ(read_json(run_file("manifest.json"))["exit_code"], 128 + number);
    EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
    EXPECT_EQ(read_json(run_file("summary.json"))["steps"], static_cast<int64_t>(steps().size()));
  }
}

/// A rank that another launcher started answers signals by itself.
TEST_F(Worker, ARankOfAnotherLauncherSaysThatItStopsAndTakesAPairOfSignalsForOne) {
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "1"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"LOCAL_WORLD_SIZE", "1"},
                                                           {"MASTER_PORT", "0"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"}};
  for (const auto& [name, value] : variables) front_.set(name, value);
  auto training = front_.start(kTiny + Words{"--train.steps=1000000"});
  wait_until([&] { return std::filesystem::exists(front_.file("runs/latest")) && steps().size() >= 2; });
  training.signal(SIGINT);
  training.signal(SIGINT);
  const Outcome outcome = training.wait(60.0);
  EXPECT_EQ(outcome.code, 128 + SIGINT) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "stopping after this step; again to abort now\n")) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "interrupted by SIGINT after step ")) << outcome.out;
  EXPECT_TRUE(std::filesystem::exists(run_file("checkpoints/final/model.safetensors")));
}

TEST_F(Worker, ASignalEndsTheWaitForOtherRanks) {
  lose_peers();
  auto joining = front_.start(kTiny);
  wait_until_it_joins();
  joining.signal(SIGTERM);
  const double began = monotonic_seconds();
  EXPECT_EQ(joining.wait(60.0).code, 128 + SIGTERM);
  EXPECT_LT(monotonic_seconds() - began, 3.0);
}

/// Words for a run of one rank that saves after its last step.
Words saving(int steps) {
  return kTiny + Words{"-n", "1", "--checkpoint.every=100", fmt::format("--train.steps={}", steps)};
}

TEST_F(Worker, ARunThatGoesOnKeepsTheConfigThatItGoesOnWith) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  const std::string first = read_file(run_file("config.yaml"));
  const Words resume = {"train", "-n", "1", "--resume=latest"};
  EXPECT_EQ(front_.run(resume + Words{"--model.n_layers=3", "--train.steps=4"}).code, 2);
  EXPECT_EQ(read_file(run_file("config.yaml")), first) << "its checkpoint refuses the other model";
  const Outcome outcome = front_.run(resume + Words{"--train.steps=4"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(steps().size(), 4u);
  const std::string second = read_file(run_file("config.yaml"));
  EXPECT_TRUE(contains(second, "  steps: 4 ")) << second;
  EXPECT_TRUE(contains(second, "# --train.steps\n")) << second;
  EXPECT_FALSE(contains(second, "config.yaml:"))
      << "what stayed came from where it came from before: " << second;
  EXPECT_EQ(read_file(run_file("config.attempt-2.yaml")), first);
}

TEST_F(Worker, ARunThatWasToGoOnIsPreemptedBeforeItsRanksHaveMet) {
  ASSERT_EQ(front_.run(saving(2)).code, 0);
  lose_peers();
  auto joining = front_.start({"train", "--resume=latest", "--train.steps=4"});
  wait_until_it_joins();
  joining.signal(SIGTERM);
  EXPECT_EQ(joining.wait(60.0).code, 75);
}

/// torchrun kills what is left of an attempt and starts the same command again.
TEST_F(Worker, ARankThatAnotherLauncherStartsAgainGoesOnWithResume) {
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "1"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"LOCAL_WORLD_SIZE", "1"},
                                                           {"MASTER_PORT", "0"},
                                                           {"MASTER_ADDR", "127.0.0.1"},
                                                           {"TORCHELASTIC_RUN_ID", "x"},
                                                           {"TORCHELASTIC_RESTART_COUNT", "0"}};
  for (const auto& [name, value] : variables) front_.set(name, value);
  const Words command = kTiny + Words{"--checkpoint.every=100", "--checkpoint.keep=0", "--resume=auto"};
  {
    auto training = front_.start(command + Words{"--train.steps=1000000"});
    wait_until([&] {
      return std::filesystem::exists(run_file("checkpoints/step-00000100/COMMIT.json")) &&
             steps().size() > 102;
    });
    training.signal(SIGKILL);
    EXPECT_EQ(training.wait(60.0).code, 128 + SIGKILL);
  }
  const auto last = static_cast<int64_t>(steps().size()) + 3;
  front_.set("TORCHELASTIC_RESTART_COUNT", "1");
  const Outcome again = front_.run(command + Words{fmt::format("--train.steps={}", last)});
  ASSERT_EQ(again.code, 0) << again.err;
  const auto records = steps();
  ASSERT_EQ(static_cast<int64_t>(records.size()), last);
  for (int64_t i = 0; i < last; ++i) EXPECT_EQ(records[static_cast<size_t>(i)]["step"], i + 1);
  const auto attempts = read_json(run_file("manifest.json"))["attempts"];
  ASSERT_EQ(attempts.size(), 2u) << attempts;
  EXPECT_TRUE(attempts[0]["exit_code"].is_null()) << "nobody was left to say it";
  EXPECT_GE(attempts[1]["resumed_from"], 100);
  EXPECT_EQ(attempts[1]["resumed_from"].get<int64_t>() % 100, 0);
  EXPECT_EQ(attempts[1]["steps_lost"], last - 3 - attempts[1]["resumed_from"].get<int64_t>());
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
      {{"--data.path=nowhere.txt"}, 2, "nowhere.txt"},
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
  EXPECT_TRUE(contains(outcome.err, "Try, in this order and together: ")) << outcome.err;
}

TEST_F(Worker, OutOfHostMemoryOfTwoRanksIsOneMessage) {
  front_.limit_memory(int64_t{2} << 30);
  const Outcome outcome =
      front_.run(kTiny + Words{"-n", "2", "--train.steps=2", "--model.n_layers=24", "--model.d_model=768",
                               "--model.n_heads=8", "--parallel.policy=ddp"});
  EXPECT_EQ(outcome.code, 4) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "the host is out of memory")) << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "lost a peer")) << outcome.err;
}

TEST_F(Worker, DrawsDigitsAndSaysWhatAFolderHolds) {
  const Words make = {"data", "make",   "digits", "--format", "mnist",  "--train",
                      "100",  "--test", "20",     "--out",    "digits", "--json"};
  const Outcome made = front_.run(make);
  if (made.code == 3) GTEST_SKIP() << made.err;  // no fonts here, or a build without FreeType
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_FALSE(made.json()["was_there"].get<bool>());
  for (const char* none : {"--train=0", "--train=-5", "--test=0"})
    EXPECT_EQ(front_.run({"data", "make", "digits", none, "--out", "none"}).code, 2) << none;
  const Outcome again = front_.run(make);
  EXPECT_TRUE(again.json()["was_there"].get<bool>()) << again.err;
  EXPECT_EQ(again.json()["digest"], made.json()["digest"]);
  const Outcome info = front_.run({"data", "info", "digits", "--json"});
  ASSERT_EQ(info.code, 0) << info.err;
  EXPECT_EQ(info.json()["format"], "idx");
  EXPECT_EQ(info.json()["train"]["shape"], (std::vector<int>{1, 28, 28}));
  EXPECT_EQ(info.json()["train"]["by_class"], std::vector<int>(10, 10));
  EXPECT_EQ(info.json()["val"]["by_class"], std::vector<int>(10, 2));
  const Outcome table = front_.run({"data", "info", "digits", "--sheet", "sheet.png"});
  EXPECT_TRUE(contains(table.out, "idx, 10 classes")) << table.out << table.err;
  EXPECT_TRUE(read_file(front_.file("sheet.png")).starts_with("\x89PNG"));
}

TEST_F(Worker, TrainsOnDigitsByEpochs) {
  const Outcome made = front_.run(
      {"data", "make", "digits", "--format", "mnist", "--train", "100", "--test", "20", "--out", "digits"});
  if (made.code == 3) GTEST_SKIP() << made.err;  // no fonts here, or a build without FreeType
  const Words train = {"train",
                       "-n",
                       "2",
                       "--model.preset=lenet",
                       "--data.path=digits",
                       "--train.epochs=2",
                       "--train.global_batch=32"};
  const Outcome plan = front_.run(train + Words{"--dry-run"});
  EXPECT_TRUE(contains(plan.out, "32 a step, 2 epochs")) << plan.out << plan.err;
  const Outcome run = front_.run(train + Words{"--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  std::vector<nlohmann::json> steps;
  for (const std::string& line : split(run.out, '\n')) {
    if (line.starts_with("{\"step\"")) steps.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(steps.size(), 8u) << "two epochs of 32, 32, 32 and 4 images";
  EXPECT_EQ(steps.back()["tokens"], 200);
  for (const auto& step : steps)
    EXPECT_EQ(step.contains("val_top1"), step["step"].get<int>() % 4 == 0) << step;
  const Outcome text = front_.run(train);
  EXPECT_TRUE(contains(text.out, "img/s")) << text.out;
  EXPECT_TRUE(contains(text.err, "100 + 20 images of 10 classes")) << text.err;
  EXPECT_TRUE(contains(text.err, "pictures of what was mistaken for what in runs/")) << text.err;
  const auto validation = nlohmann::json::parse(read_file(front_.file("runs/latest/validation.json")));
  EXPECT_EQ(validation["images"], 20);
  EXPECT_EQ(validation["right"], std::llround(20.0 * steps.back()["val_top1"].get<double>()))
      << "of an equal run";
  EXPECT_EQ(validation["mistakes"].size(), 20U - validation["right"].get<size_t>());
  ASSERT_EQ(front_.run({"report", "latest"}).code, 0);
  const std::string page = read_file(front_.file("runs/latest/report.html"));
  for (const char* name : {"confusion", "mistakes"}) {
    const std::string picture = read_file(front_.file(fmt::format("runs/latest/pictures/{}.svg", name)));
    EXPECT_TRUE(contains(page, picture)) << name << " is no part of the page";
  }
  EXPECT_TRUE(contains(read_file(front_.file("runs/latest/pictures/curves.svg")), "Validation accuracy"));
}

TEST_F(Worker, RefusesFoldersWithoutImages) {
  const Outcome outcome = front_.run({"data", "info", "."});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "holds no images")) << outcome.err;
}

}  // namespace
}  // namespace trireme::cli
