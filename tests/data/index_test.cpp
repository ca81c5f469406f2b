#include "trireme/data/index.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

using Json = nlohmann::json;

TokenIndex example() {
  TokenIndex index{.tokenizer = "byte",
                   .vocab_size = 256,
                   .source = "/corpus",
                   .source_files = 3,
                   .source_bytes = 150,
                   .not_utf8_files = 1,
                   .first_not_utf8 = "/corpus/b",
                   .val_fraction = 0.25,
                   .splits = {}};
  index.splits["train"] = {
      .tokens = 100, .documents = 2, .shards = {{"a.tokens", 60, 4}, {"b.tokens", 40, 3}}};
  index.splits["val"] = {.tokens = 50, .documents = 1, .shards = {{"c.tokens", 50, 1}}};
  return index;
}

TEST(TokenIndex, IsReadBackAsWritten) {
  const testing::Scratch scratch;
  write_index(scratch.path(""), example());
  const TokenIndex index = read_index(scratch.path(""));
  EXPECT_EQ(index.tokenizer, "byte");
  EXPECT_EQ(index.vocab_size, 256);
  EXPECT_EQ(index.source, "/corpus");
  EXPECT_EQ(index.source_files, 3);
  EXPECT_EQ(index.source_bytes, 150);
  EXPECT_EQ(index.not_utf8_files, 1);
  EXPECT_EQ(index.first_not_utf8, "/corpus/b");
  EXPECT_EQ(index.val_fraction, 0.25);
  EXPECT_EQ(index.documents(), 3);
  const SplitEntry& train = index.splits.at("train");
  ASSERT_EQ(train.shards.size(), 2u);
  EXPECT_EQ(train.shards[1].file, "b.tokens");
  EXPECT_EQ(train.shards[1].tokens, 40);
  EXPECT_EQ(train.shards[1].chunks, 3);
  EXPECT_EQ(index.splits.at("val").tokens, 50);
}

TEST(TokenIndex, TakesTwoBytesATokenUpToUint16) {
  EXPECT_EQ(bytes_per_token(256), 2);
  EXPECT_EQ(bytes_per_token(65536), 2);
  EXPECT_EQ(bytes_per_token(65537), 4);
}

TEST(TokenIndex, SurvivesASourcePathThatIsNotUtf8) {
  const testing::Scratch scratch;
  TokenIndex index = example();
  index.source = "/corpus/\xff";
  write_index(scratch.path(""), index);
  EXPECT_NO_THROW(read_index(scratch.path("")));
}

/// The example with one value replaced.
Json with(const Json& base, const char* pointer, const Json& value) {
  Json changed = base;
  changed[Json::json_pointer(pointer)] = value;
  return changed;
}

TEST(TokenIndex, RefusesWhatMakesNoSenseAndNamesTheFile) {
  const testing::Scratch scratch;
  write_index(scratch.path(""), example());
  const Json base = Json::parse(testing::slurp(scratch.path("index.json")));
  const struct {
    const char* pointer;
    Json value;
  } changes[] = {
      {"/schema", "trireme.tokens/2"},
      {"/schema", 1},
      {"/vocab_size", 0},
      {"/vocab_size", "many"},
      {"/splits", Json::array()},
      {"/splits/train/shards", 7},
      {"/splits/train/tokens", 99},
      {"/splits/train/shards/0/tokens", -60},
      {"/splits/train/shards/0/tokens", int64_t{1} << 62},
      {"/splits/train/shards/0/chunks", 0},
      {"/splits/train/shards/0/chunks", 61},
      {"/splits/train/shards/0/file", "../a.tokens"},
      {"/splits/train/shards/0/file", "/etc/passwd"},
      {"/splits/train/shards/0/file", ".."},
      {"/splits/train/shards/0/file", ""},
      {"/source", nullptr},
  };
  for (const auto& change : changes) {
    scratch.write("index.json", with(base, change.pointer, change.value).dump());
    const std::string message = testing::message_of<DataError>([&] { read_index(scratch.path("")); });
    EXPECT_NE(message.find("index.json"), std::string::npos) << change.pointer << ": " << message;
  }
}

TEST(TokenIndex, RefusesAMissingSplitATruncatedFileAndAnAbsentOne) {
  const testing::Scratch scratch;
  EXPECT_THROW(read_index(scratch.path("")), DataError);
  write_index(scratch.path(""), example());
  const std::string text = testing::slurp(scratch.path("index.json"));
  for (size_t size = 0; size + 2 < text.size(); size += 7) {
    scratch.write("index.json", text.substr(0, size));
    EXPECT_THROW(read_index(scratch.path("")), DataError) << size;
  }
  Json without_val = Json::parse(text);
  without_val["splits"].erase("val");
  scratch.write("index.json", without_val.dump());
  const std::string message = testing::message_of<DataError>([&] { read_index(scratch.path("")); });
  EXPECT_NE(message.find("'val'"), std::string::npos) << message;
}

TEST(TokenIndex, APipeInItsPlaceIsRefusedAndNotWaitedFor) {
  const testing::Scratch scratch;
  ASSERT_EQ(::mkfifo(scratch.path("index.json").c_str(), 0644), 0);
  EXPECT_THROW(read_index(scratch.path("")), DataError);
}

}  // namespace
}  // namespace trireme::data
