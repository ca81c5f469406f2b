// The command and its real worker, end to end: what the README tells a user to run, shortened, and what its
// runs leave behind.
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "tests/cli/stories.h"
#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/base/utf8.h"

namespace trireme::cli {
namespace {

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

/// The commands of docs/guide/text_models.md, on stories that are made up.
TEST_F(Worker, TellsAStory) {
  std::filesystem::create_directory(front_.file("data"));
  write_file_atomic(front_.file("data/tinystories.txt"), made_up_stories(400));
  const Outcome learned = front_.run(
      {"data", "train-tokenizer", "data/tinystories.txt", "--vocab=400", "--out=tinystories.json"});
  ASSERT_EQ(learned.code, 0) << learned.err;
  const Outcome trained =
      front_.run({"train", TRIREME_CONFIGS "/tinystories.yaml", "--device=cpu", "-n", "2", "--train.steps=30",
                  "--optim.warmup_steps=5", "--data.seq_len=64", "--train.val_batches=1"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_TRUE(contains(trained.err, "400 documents")) << trained.err;
  EXPECT_TRUE(contains(trained.out, "sample:\nOnce upon a time")) << trained.out;
  const auto records = steps();
  EXPECT_LT(records.back()["loss"].get<double>(), 0.5 * records.front()["loss"].get<double>());
  const Outcome told = front_.run({"generate", "latest", "--prompt", "Once upon a time", "--temperature=0"});
  ASSERT_EQ(told.code, 0) << told.err;
  EXPECT_TRUE(contains(told.out, "Once upon a time, there was a ")) << told.out;
}

TEST_F(Worker, TrainsOnJsonLinesAsOnTheirText) {
  std::string text, lines;
  for (int i = 0; i < 300; ++i) {
    const std::string document = "stroke " + std::to_string(i * 37) + " of the rowers\n";
    text += document + "<|endoftext|>\n";
    lines += nlohmann::json{{"id", i}, {"body", document}}.dump() + "\n";
  }
  write_file_atomic(front_.file("d.txt"), text);
  write_file_atomic(front_.file("d.jsonl"), lines);
  const auto digest_after = [&](const Words& words) {
    const Outcome outcome = front_.run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return read_json(run_file("summary.json"))["weights_digest"].get<std::string>();
  };
  const Words command =
      kTiny + Words{"--data.val_fraction=0", "--train.val_batches=0", "--optim.schedule=constant", "-n", "2"};
  const std::string digest = digest_after(command + Words{"--data.path=d.txt", "--train.steps=4"});
  const Words on_lines = command + Words{"--data.path=d.jsonl#body"};
  EXPECT_EQ(digest_after(on_lines + Words{"--train.steps=4"}), digest);
  // The run keeps path and field, and goes on from the same tokens.
  EXPECT_NE(digest_after(on_lines + Words{"--train.steps=2", "--checkpoint.every=2"}), digest);
  EXPECT_EQ(digest_after({"train", "--resume", "latest", "--train.steps=4"}), digest);
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

TEST_F(Worker, GeneratesWithTheTokenizerThatARunWasTrainedWith) {
  const std::string tokenizer = front_.file("llama2.json");
  std::filesystem::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", tokenizer);
  const Outcome trained =
      front_.run(kTiny + Words{"--train.steps=2", "-n", "1", "--data.tokenizer=llama2.json"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_TRUE(contains(trained.err, "llama2.json (")) << trained.err;
  EXPECT_TRUE(contains(read_file(run_file("tokenizer.txt")), "llama2.json ("));
  const Words command = {"generate", "latest", "--prompt", "the ", "--max-tokens", "9"};
  const Outcome text = front_.run(command);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with("the ")) << text.out;
  std::ofstream(tokenizer, std::ios::app) << "\n";
  const Outcome refused = front_.run(command);
  EXPECT_EQ(refused.code, 2) << refused.err;
  EXPECT_TRUE(contains(refused.err, "was trained with the tokenizer llama2.json (")) << refused.err;
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

TEST_F(Worker, PlansEveryFileOfConfigs) {
  const std::map<std::string, int64_t> published = {{"llama-1b", 1'235'814'400},
                                                    {"llama-8b", 8'030'261'248}};  // meta-llama's model cards
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(TRIREME_CONFIGS)) {
    if (!file.is_regular_file()) continue;  // the folder of DeepSpeed's files
    const std::string name = file.path().stem().string();
    const auto with_text = [&](std::vector<std::string> command) {
      if (name == "tinystories")  // its text and its tokenizer are made by its page's commands
        command.insert(command.end(), {"--data.path=builtin", "--data.tokenizer=byte"});
      return front_.run(command);
    };
    const Outcome shown = front_.run({"config", "show", file.path().string()});
    EXPECT_EQ(shown.code, 0) << name << shown.err;
    const bool on_eight = name.starts_with("mini-gpt-");
    for (const std::string ranks : {"1", "2", "4", "8"}) {
      if (!on_eight && ranks == "8") continue;  // batches of some are too small
      const Outcome plan = with_text(
          {"train", "--config", file.path().string(), "--dry-run", "--json", "--device=cpu", "-n", ranks});
      if (name == "pipeline" && ranks == "1") {
        EXPECT_EQ(plan.code, 2) << "two stages have no place: " << plan.err;
        continue;
      }
      if (on_eight && ranks != "8") {
        EXPECT_EQ(plan.code, 2) << "a mesh of 8 has no place: " << plan.err;
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

}  // namespace
}  // namespace trireme::cli
