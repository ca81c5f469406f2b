// Commands about text: a tokenizer is learned, and what it makes of a text is shown.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

class DataText : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 200; ++i)
      text += "The cat number " + std::to_string(i * 37) + " sat on a mat, didn't it?\n";
    write_file_atomic(front_.file("a.txt"), text);
    make_directories(front_.file("more"));
    write_file_atomic(front_.file("more/b.txt"), "Dogs.\n<|endoftext|>\nMore dogs.\n<|endoftext|>\n");
  }

  FrontProcess front_;
};

using TrainTokenizer = DataText;

TEST_F(TrainTokenizer, WritesOneThatTrainingTakes) {
  const Outcome outcome = front_.run({"data", "train-tokenizer", "a.txt", "more", "--vocab", "300"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(outcome.out.starts_with("tokenizer.json: 300 tokens, 43 of them merged, ")) << outcome.out;
  EXPECT_TRUE(contains(outcome.err, "2 files, ")) << outcome.err;
  const Outcome config = front_.run({"config", "show", "--data.tokenizer=tokenizer.json", "--json"});
  EXPECT_EQ(config.json()["config"]["model"]["vocab_size"], 300) << config.err;
}

TEST_F(TrainTokenizer, IsTheSameOnAnyNumberOfThreads) {
  for (const char* threads : {"1", "2", "5"}) {
    const Outcome outcome = front_.run({"data", "train-tokenizer", "a.txt", "--vocab=300", "--threads",
                                        threads, "--out", std::string("t") + threads});
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  EXPECT_EQ(read_file(front_.file("t1")), read_file(front_.file("t2")));
  EXPECT_EQ(read_file(front_.file("t1")), read_file(front_.file("t5")));
}

TEST_F(TrainTokenizer, TellsInJsonWhatItLearned) {
  const Outcome outcome = front_.run({"data", "train-tokenizer", "a.txt", "more", "--vocab=290", "--special",
                                      "<pad>", "--special", "</s>", "--out", "new/folder/t.json", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = outcome.json();
  EXPECT_EQ(json["path"], "new/folder/t.json");
  EXPECT_EQ(json["vocab_size"], 290);
  EXPECT_EQ(json["merges"], 32);
  EXPECT_EQ(json["special"], (Words{"<pad>", "</s>"}));
  EXPECT_EQ(json["files"], 2);
  EXPECT_GT(json["bytes_per_token"], 1.0);
  EXPECT_TRUE(fs::exists(front_.file("new/folder/t.json")));
}

TEST_F(TrainTokenizer, LinesThatEndDocumentsTeachNothing) {
  const Outcome outcome = front_.run({"data", "train-tokenizer", "more", "--vocab=2000", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["words"], 7);  // "Dogs", ".", "\n", "More", " dogs", ".", "\n"
  EXPECT_TRUE(contains(outcome.err, "no more than 8 merges, so there are 265 tokens instead of 2,000"))
      << outcome.err;
}

TEST_F(TrainTokenizer, TakesBytesThatAreNoText) {
  write_file_atomic(front_.file("binary"), std::string("\xff\xfe\0abc abc \x80", 12));
  const Outcome outcome = front_.run({"data", "train-tokenizer", "a.txt", "binary", "--vocab=260"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "1 of 2 files is not UTF-8")) << outcome.err;
}

TEST_F(TrainTokenizer, RefusesWhatItCannotLearnFrom) {
  write_file_atomic(front_.file("empty.txt"), "");
  write_file_atomic(front_.file("ends.txt"), "<|endoftext|>\n<|endoftext|>\n");
  const auto refused = [&](const Words& words, const std::string& said) {
    const Outcome outcome = front_.run(Words{"data", "train-tokenizer"} + words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
    EXPECT_FALSE(fs::exists(front_.file("tokenizer.json")));
  };
  refused({}, "TEXT is required");
  refused({"nowhere.txt"}, "there is no nowhere.txt; name a text file");
  refused({"empty.txt"}, "is empty (0 bytes)");
  refused({"ends.txt"}, "have no words");
  refused({"a.txt", "--vocab=256"}, "has no room for 256 bytes and 1 special token; choose 257 or more");
  refused({"a.txt", "--vocab=0"}, "not in range");
  refused({"a.txt", "--special", ""}, "empty value");
}

TEST_F(TrainTokenizer, ReplacesOnlyAFileThatIsNamed) {
  const Words words = {"data", "train-tokenizer", "a.txt", "--vocab=260"};
  EXPECT_EQ(front_.run(words).code, 0);
  const Outcome again = front_.run(words);
  EXPECT_EQ(again.code, 2);
  EXPECT_TRUE(contains(again.err, "tokenizer.json exists already\nhint: name the file")) << again.err;
  EXPECT_EQ(front_.run(words + Words{"--out", "tokenizer.json"}).code, 0);
  EXPECT_EQ(front_.run(words + Words{"--out", "more"}).code, 0);
  EXPECT_TRUE(fs::exists(front_.file("more/tokenizer.json")));
  for (const char* folder : {"more", "more/"}) {
    const Outcome there = front_.run(words + Words{"--out", folder});
    EXPECT_EQ(there.code, 2);
    EXPECT_TRUE(contains(there.err, "more/tokenizer.json exists already")) << there.err;
  }
  EXPECT_EQ(front_.run(words + Words{"--out", "more/tokenizer.json"}).code, 0);
}

TEST_F(TrainTokenizer, MakesTheFolderThatASlashEnds) {
  const Outcome outcome =
      front_.run({"data", "train-tokenizer", "a.txt", "--vocab=260", "--out", "new/deep/"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(fs::is_regular_file(front_.file("new/deep/tokenizer.json")));
  const auto entries = fs::directory_iterator(front_.file("new/deep"));
  EXPECT_EQ(std::distance(begin(entries), end(entries)), 1) << "nothing is left of the trial";
}

/// A text that cannot be read tells whether the output was tried before.
TEST_F(TrainTokenizer, TriesTheOutputBeforeItCounts) {
  write_file_atomic(front_.file("broken.jsonl"), "{\"text\": \n");
  const Words words = {"data", "train-tokenizer", "broken.jsonl", "--out"};
  EXPECT_EQ(front_.run(words + Words{"t.json"}).code, 7);
  EXPECT_FALSE(fs::exists(front_.file("t.json")));
  const Outcome in_file = front_.run(words + Words{"a.txt/t.json"});
  EXPECT_EQ(in_file.code, static_cast<int>(ExitCode::kEnvironment)) << in_file.err;
  EXPECT_TRUE(contains(in_file.err, "a.txt")) << in_file.err;
  const Outcome nowhere = front_.run(words + Words{"/proc/t.json"});
  EXPECT_EQ(nowhere.code, static_cast<int>(ExitCode::kEnvironment)) << nowhere.err;
  EXPECT_TRUE(contains(nowhere.err, "[cli.data] /proc/t.json cannot be written")) << nowhere.err;
}

/// JSON Lines with the documents of `more`.
constexpr const char* kJsonLines = "{\"text\": \"Dogs.\\n\"}\n{\"text\": \"More dogs.\\n\"}\n";

TEST_F(TrainTokenizer, LearnsTheSameFromJsonLines) {
  write_file_atomic(front_.file("b.jsonl"), kJsonLines);
  ASSERT_EQ(front_.run({"data", "train-tokenizer", "more", "--vocab=2000", "--out=text.json"}).code, 0);
  const Outcome outcome =
      front_.run({"data", "train-tokenizer", "b.jsonl", "--vocab=2000", "--out=lines.json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(read_file(front_.file("lines.json")), read_file(front_.file("text.json")));
}

using Inspect = DataText;

TEST_F(Inspect, ReadsJsonLines) {
  write_file_atomic(front_.file("b.jsonl"), kJsonLines);
  write_file_atomic(front_.file("c.jsonl"), "{\"id\": 7, \"body\": \"Dogs.\\n\"}\n");
  write_file_atomic(front_.file("d.jsonl"), "{\"text\": \"Dogs.\\n\"}\n{\"text\": \n");
  const auto of = [&](const std::string& path) { return front_.run({"data", "inspect", path, "--json"}); };
  const auto lines = of("b.jsonl").json(), text = of("more").json();
  for (const char* key : {"documents", "bytes", "tokens", "windows", "frequent"})
    EXPECT_EQ(lines[key], text[key]) << key;
  EXPECT_EQ(of("c.jsonl#body").json()["documents"], 1);
  const Outcome no_field = of("c.jsonl");
  EXPECT_EQ(no_field.code, 2);
  EXPECT_TRUE(contains(no_field.err, "there is no field 'text', but id, body; name")) << no_field.err;
  EXPECT_TRUE(contains(no_field.err, "c.jsonl#body")) << no_field.err;
  const Outcome broken = of("d.jsonl");
  EXPECT_EQ(broken.code, 7);
  EXPECT_TRUE(contains(broken.err, "d.jsonl, line 2: ")) << broken.err;
}

TEST_F(DataText, ARunKeepsTheFieldWithTheWholePath) {
  write_file_atomic(front_.file("c.jsonl"), "{\"body\": \"Dogs.\"}\n");
  front_.set_worker(recorder(0));
  const Outcome run = front_.run({"train", "--data.path=c.jsonl#body", "--device=cpu", "-n", "1"});
  ASSERT_EQ(run.code, 0) << run.err;
  const Outcome kept = front_.run({"config", "show", "runs/latest/config.yaml", "--json"});
  const std::string path = kept.json()["config"]["data"]["path"];
  EXPECT_TRUE(fs::path(path).is_absolute()) << path;
  ASSERT_TRUE(path.ends_with("/c.jsonl#body")) << path;
  EXPECT_TRUE(fs::equivalent(path.substr(0, path.size() - 5), front_.file("c.jsonl"))) << path;
  const Outcome none =
      front_.run({"train", "--data.path=d.jsonl#body", "--device=cpu", "-n", "1", "--dry-run"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(contains(none.err, "d.jsonl does not exist")) << none.err;
}

/// No rank is started for them.
TEST_F(DataText, FilesThatAreNotReadAreRefusedWithTheWayOut) {
  front_.set_worker(recorder(0));
  make_directories(front_.file("mixed"));
  write_file_atomic(front_.file("mixed/a.txt"), "text");
  write_file_atomic(front_.file("mixed/b.csv.gz"), "text");
  write_file_atomic(front_.file("c.json.gz"), "text");
  const auto refused = [&](const std::string& path, const std::string& said) {
    for (const Words& words : {Words{"train", "--device=cpu", "-n", "1", "--data.path=" + path},
                               Words{"data", "inspect", path}, Words{"data", "train-tokenizer", path}}) {
      const Outcome outcome = front_.run(words);
      EXPECT_EQ(outcome.code, 2) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
    }
    EXPECT_FALSE(fs::exists(front_.file("request-0")));
  };
  refused("mixed", "mixed/b.csv.gz is packed, and only JSON Lines are read so");
  refused("c.json.gz", "c.json.gz', or, if each line of it is a JSON object, give it a name with .jsonl");
}

TEST_F(DataText, AFieldWithoutAFileIsRefused) {
  const Outcome outcome = front_.run({"train", "--data.path=#body", "--device=cpu", "-n", "1", "--dry-run"});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "data.path=#body names a field of JSON Lines, but no file"))
      << outcome.err;
}

TEST_F(Inspect, ShowsTheTokensOfTraining) {
  write_file_atomic(front_.file("c.txt"), "a|b\tc\n<|endoftext|>\nlonger text\n");
  const Outcome outcome = front_.run({"data", "inspect", "c.txt", "--data.seq_len=8"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "text       1 file, 2 documents, 18 B\n")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "tokenizer  byte, 256 tokens, ")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "tokens     18, 1.00 bytes a token\n")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "longest    document 1 with 12 tokens, 12 B, in ")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "window 0   a|\\||b|\\t|c|\\n|?|l\n")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "window 1   o|n|g|e|r| |t|e\n")) << outcome.out;
}

TEST_F(Inspect, TellsTheSameInJson) {
  ASSERT_EQ(front_.run({"data", "train-tokenizer", "a.txt", "--vocab=400", "--json"}).code, 0);
  const Outcome outcome = front_.run({"data", "inspect", "a.txt", "--data.tokenizer=tokenizer.json",
                                      "--data.seq_len", "4", "--windows=1", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = outcome.json();
  EXPECT_EQ(json["vocab_size"], 400);
  EXPECT_EQ(json["documents"], 1);
  EXPECT_EQ(json["unknown"], 0);
  EXPECT_GT(json["bytes_per_token"], 1.0);
  EXPECT_EQ(json["windows"], (nlohmann::json{{"The", " cat", " number", " 0"}}));
  const Outcome more = front_.run({"data", "inspect", "more", "--data.tokenizer=tokenizer.json", "--json"});
  const auto window = more.json()["windows"][0].get<Words>();
  EXPECT_EQ(std::ranges::count(window, "<|endoftext|>"), 1) << more.out;
}

TEST_F(Inspect, CountsUnknownAndSpecialTokens) {
  fs::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", front_.file("llama2.json"));
  write_file_atomic(front_.file("c.txt"), "a <unk> b </s>");
  const Outcome outcome = front_.run({"data", "inspect", "c.txt", "--data.tokenizer=llama2.json", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["unknown"], 1);
  EXPECT_EQ(outcome.json()["special"], 2);
}

TEST_F(Inspect, RefusesWhatTrainingRefuses) {
  const auto refused = [&](const Words& words, const std::string& said) {
    const Outcome outcome = front_.run(Words{"data", "inspect"} + words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
  };
  refused({"nowhere"}, "there is no nowhere");
  refused({"a.txt", "--data.tokenizer=none.json"}, "none.json does not exist");
  refused({"a.txt", "--windows=-1"}, "not in range");
  write_file_atomic(front_.file("ends.txt"), "<|endoftext|>\n<|endoftext|>\n");
  refused({"ends.txt"}, "ends.txt (28 B) has no documents; name a text");
  refused({"ends.txt", "--json"}, "has no documents");
}

}  // namespace
}  // namespace trireme::cli
