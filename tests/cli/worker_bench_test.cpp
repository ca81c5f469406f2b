// `bench` with its real worker, but for pipelines: speed, memory and collectives.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/text.h"

namespace trireme::cli {
namespace {

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

  const Outcome text = bench({"--micro-batch-sizes", "2"});
  ASSERT_EQ(text.code, 0) << text.err;
  const auto lines = split(text.out, '\n');
  EXPECT_FALSE(contains(lines[0], "95%")) << "two rounds cannot say that: " << lines[0];
  ASSERT_EQ(lines.size(), 1u + 2 + 1 + 1) << "titles, two rows, the recommendation: " << text.out;
  EXPECT_TRUE(lines[3].starts_with("recommended: --parallel.policy=")) << text.out;
  EXPECT_TRUE(contains(lines[3], " --train.micro_batch=2  (")) << text.out;
  EXPECT_EQ(bench({"--micro-batch-sizes", "3"}).code, 2) << "which divides no batch of 2 a rank";
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

TEST_F(Worker, BenchCommShowsFormsOutOfPlaceAndInPlaceBesideEachOther) {
  const Outcome outcome = front_.run({"bench", "comm", "-n", "2", "--mib", "1", "--rounds", "1"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "busbw: of the bytes that one rank receives")) << outcome.out;
  const auto lines = split(outcome.out, '\n');
  for (const auto& line : lines) EXPECT_LE(line.size(), 110u) << line;
  EXPECT_EQ(lines[0].find("out of place") + 12, lines[1].find("wrong") + 5) << outcome.out;
  EXPECT_TRUE(lines[0].ends_with("in place") && lines[0].size() == lines[1].size()) << outcome.out;
  // The counts below both titles "wrong".
  const auto wrong = [&](const std::string& operation) {
    const auto line = std::ranges::find_if(lines, [&](const auto& one) {
      return contains(one, " " + operation + " ") && contains(one, " backend ");
    });
    std::istringstream words(line == lines.end() ? "" : std::string(line->substr(line->find(" backend "))));
    const std::vector<std::string> cells{std::istream_iterator<std::string>(words), {}};
    return cells.size() == 9 ? cells[4] + " " + cells[8] : "no such line";
  };
  for (const char* both : {"all_gather", "gather", "scatter"}) EXPECT_EQ(wrong(both), "0 0") << both;
  for (const char* one : {"all_reduce", "broadcast", "reduce"}) EXPECT_EQ(wrong(one), "n/a 0") << one;
  EXPECT_EQ(wrong("all_to_all"), "0 n/a") << outcome.out;
}

/// A worker that is stopped does not end by itself when it is asked to.
TEST_F(Worker, BenchCommShowsWhatWasWrongAndMessagesBetweenEachTwoRanks) {
  const Words words = {"bench", "comm", "-n", "3", "--mib", "1", "--rounds", "1", "--pairs"};
  const Outcome text = front_.run(words);
  ASSERT_EQ(text.code, 0) << text.err;
  for (const char* part : {"wrong", "all_to_all", "from 2", "to 1", "us, 4 bytes"})
    EXPECT_TRUE(contains(text.out, part)) << part << text.out;
  const nlohmann::json json = front_.run(words + Words{"--json"}).json();
  EXPECT_EQ(json["pairs"].size(), 6u);
  std::map<std::string, int> forms;
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["wrong"], 0) << row;
    forms[row["operation"].get<std::string>() + (row["in_place"].get<bool>() ? " in place" : "")] += 1;
  }
  for (const char* form : {"reduce in place", "gather", "gather in place", "scatter", "scatter in place"})
    EXPECT_EQ(forms[form], 1) << form;
  EXPECT_FALSE(forms.contains("reduce")) << "which the group has in place only";
}

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

}  // namespace
}  // namespace trireme::cli
