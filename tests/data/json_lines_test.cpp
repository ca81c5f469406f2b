// JSON Lines as a corpus: the same tokens as of the same documents in a text file, and lines that are
// refused.
#include "trireme/data/json_lines.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "tests/data/tokenizer_fixture.h"
#include "tests/data/tokens.h"
#include "trireme/base/error.h"
#include "trireme/data/corpus.h"
#include "trireme/data/images/gzip.h"

namespace trireme::data {
namespace {

using testing::Scratch;
using Strings = std::vector<std::string>;

Strings documents_of(const std::string& path, const std::string& field = "") {
  JsonLines lines(path, field, [] {});
  Strings found;
  while (const auto document = lines.next()) found.emplace_back(*document);
  return found;
}

std::string json_lines(const Strings& texts, const std::string& field = "text") {
  std::string lines;
  for (size_t i = 0; i < texts.size(); ++i)
    lines += nlohmann::json{{"id", i}, {field, texts[i]}}.dump(-1, ' ', /*ensure_ascii=*/i % 2 == 0) + "\n";
  return lines;
}

Strings many_texts() {
  Strings texts;
  for (int i = 0; i < 3000; ++i) {
    std::string text = "\"Oars\", no. " + std::to_string(i) + ",\tpulled at caf\xc3\xa9 \xf0\x9f\x9a\xa3.\n";
    for (int line = 0; line < i % 17; ++line) text += "A stroke in time saves nine.\n";
    texts.push_back(text);
  }
  return texts;
}

std::string text_file(const Strings& texts) {
  std::string all;
  for (const std::string& text : texts) all += text + "<|endoftext|>\n";
  return all;
}

PreparedCorpus prepared(const Scratch& scratch, const std::string& path,
                        const std::string& tokenizer = "byte") {
  return prepare_corpus({.path = scratch.path(path),
                         .tokenizer = tokenizer,
                         .val_fraction = 0.0,
                         .cache_dir = scratch.path("cache"),
                         .seq_len = 1});
}

TEST(JsonLines, AreADocumentALine) {
  const Scratch scratch;
  const std::string path =
      scratch.write("a.jsonl",
                    "{\"text\": \"one\\nline\", \"meta\": {\"text\": [\"no\"]}}\r\n"
                    "\n"
                    "  \t\n"
                    "{\"text\": \"\"}\n"
                    "{\"meta\": [{\"text\": 1}], \"text\": \"<|endoftext|>\\n\\u00e9\"}\n"
                    "{\"text\": \"first\", \"text\": \"last\"}");
  EXPECT_EQ(documents_of(path), (Strings{"one\nline", "<|endoftext|>\n\xc3\xa9", "last"}));
}

TEST(JsonLines, TakeTheFieldThatIsNamed) {
  const Scratch scratch;
  const std::string path = scratch.write("a.jsonl", json_lines({"a", "b"}, "body"));
  EXPECT_EQ(documents_of(path, "body"), (Strings{"a", "b"}));
  const std::string message = testing::message_of<ConfigError>([&] { documents_of(path); });
  EXPECT_NE(message.find("a.jsonl, line 1: there is no field 'text', but body, id; name"), std::string::npos)
      << message;
  EXPECT_NE(message.find("data.path=" + path + "#body"), std::string::npos) << message;
}

TEST(JsonLines, RefuseBrokenLinesByNumberAndReason) {
  const struct {
    const char *line, *reason;
  } cases[] = {
      {"{\"text\": \"a", "missing closing quote"},
      {"{\"text\": \"a\"} x", "column 15"},
      {"{\"text\": 7}", "its field 'text' is a number, not a string"},
      {"{\"text\": null}", "its field 'text' is null, not a string"},
      {"{\"text\": [\"a\"]}", "its field 'text' is an array, not a string"},
      {"{\"text\": {\"text\": \"a\"}}", "its field 'text' is an object, not a string"},
      {"[\"text\", \"a\"]", "it is no JSON object"},
      {"\"text\"", "it is no JSON object"},
      {"{\"text\": \"\xff\"}", "ill-formed UTF-8"},
      {"{\"text\": \"\\ud800\"}", "surrogate"},
      {"no JSON", "column 2"},
  };
  const Scratch scratch;
  for (const auto& [line, reason] : cases) {
    const std::string path =
        scratch.write("a.jsonl", "{\"text\": \"good\"}\n\n" + std::string(line) + "\n{\"text\": \"b\"}\n");
    const std::string message = testing::message_of<DataError>([&] { documents_of(path); });
    EXPECT_NE(message.find("a.jsonl, line 3: "), std::string::npos) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    EXPECT_EQ(message.find("last read"), std::string::npos) << message;
  }
}

TEST(JsonLines, GiveTheTokensOfTheSameDocumentsAsText) {
  const Scratch scratch;
  const Strings texts = many_texts();
  scratch.write("a.txt", text_file(texts));
  scratch.write("a.jsonl", json_lines(texts));
  scratch.write("b.jsonl", json_lines(texts, "story"));
  for (const std::string& tokenizer : {std::string("byte"), testing::kLlama2}) {
    const PreparedCorpus text = prepared(scratch, "a.txt", tokenizer);
    const auto tokens = testing::read_tokens(text.folder, "train");
    EXPECT_EQ(testing::read_tokens(prepared(scratch, "a.jsonl", tokenizer).folder, "train"), tokens);
    const PreparedCorpus named = prepared(scratch, "b.jsonl#story", tokenizer);
    EXPECT_EQ(testing::read_tokens(named.folder, "train"), tokens);
    EXPECT_EQ(Dataset(named.folder, "train", 8).digest(), Dataset(text.folder, "train", 8).digest());
    EXPECT_TRUE(prepared(scratch, "b.jsonl#story", tokenizer).from_cache);
  }
}

TEST(JsonLines, AreUnpackedAsTheyAreRead) {
  const Scratch scratch;
  const Strings texts = many_texts();
  const std::string lines = json_lines(texts);
  try {
    // Two members, the cut inside a line.
    scratch.write("a.jsonl.gz", packed(lines.substr(0, 70'001)) + packed(lines.substr(70'001)));
  } catch (const EnvironmentError& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(documents_of(scratch.path("a.jsonl.gz")), texts);
  std::string one_long_line(5 << 20, 'x');
  scratch.write("long.jsonl.gz", packed(json_lines({one_long_line, "b"})));
  EXPECT_EQ(documents_of(scratch.path("long.jsonl.gz")), (Strings{one_long_line, "b"}));

  const std::string whole = testing::slurp(scratch.path("a.jsonl.gz"));
  scratch.write("cut.jsonl.gz", whole.substr(0, whole.size() - 20));
  EXPECT_NE(testing::message_of<DataError>([&] {
              documents_of(scratch.path("cut.jsonl.gz"));
            }).find("cut.jsonl.gz is truncated"),
            std::string::npos);
  std::string damaged = whole;
  damaged[whole.size() / 2] = static_cast<char>(~damaged[whole.size() / 2]);
  scratch.write("damaged.jsonl.gz", damaged);
  EXPECT_NE(testing::message_of<DataError>([&] {
              documents_of(scratch.path("damaged.jsonl.gz"));
            }).find("damaged.jsonl.gz"),
            std::string::npos);
  scratch.write("not.jsonl.gz", lines);
  EXPECT_NE(testing::message_of<DataError>([&] {
              documents_of(scratch.path("not.jsonl.gz"));
            }).find("not packed by gzip"),
            std::string::npos);
}

TEST(JsonLines, HoldOutExactlyTheShareOfPackedText) {
  const Scratch scratch;
  const Strings texts = many_texts();
  size_t bytes = 0;
  for (const std::string& text : texts) bytes += text.size();
  try {
    scratch.write("a.jsonl.gz", packed(json_lines(texts)));
  } catch (const EnvironmentError& error) {
    GTEST_SKIP() << error.what();
  }
  std::vector<Progress> told;
  const PreparedCorpus corpus =
      prepare_corpus({.path = scratch.path("a.jsonl.gz"),
                      .val_fraction = 0.25,
                      .cache_dir = scratch.path("cache"),
                      .on_progress = [&](const Progress& p) { told.push_back(p); }});
  std::string held_out = testing::read_text(corpus.folder, "val");
  std::erase(held_out, '\0');  // between documents
  EXPECT_NEAR(static_cast<double>(held_out.size()), 0.25 * static_cast<double>(bytes), 4.0);
  EXPECT_LE(told.back().done, told.back().total);
  EXPECT_GT(told.back().done, told.back().total * 9 / 10);
}

}  // namespace
}  // namespace trireme::data
