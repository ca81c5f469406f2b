// One vocabulary in three formats gives the same ids.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "tests/text/gpt2_formats.h"
#include "trireme/base/error.h"
#include "trireme/text/load.h"

namespace trireme::text::testing {
namespace {

using nlohmann::json;

class FileFormats : public ::testing::Test {
 protected:
  FileFormats() {
    std::ifstream file(fixtures() + "/gpt2.json");
    const json whole = json::parse(file);
    model_ = whole["model"];
    std::ifstream texts(fixtures() + "/texts.json");
    const json written = json::parse(texts)["texts"];
    for (const std::string text : written) {
      if (text.find("<|endoftext|>") == std::string::npos) texts_.push_back(text);
    }
  }

  /// Ids of the tokenizer.json, which equals_python_test.cpp holds against Python's.
  void expect_same_ids(const Tokenizer& other) const {
    const Tokenizer tokenizer = load_tokenizer(fixtures() + "/gpt2.json");
    for (const std::string& text : texts_) {
      const std::vector<int32_t> ids = other.encode(text);
      ASSERT_EQ(ids, tokenizer.encode(text)) << text;
      ASSERT_EQ(other.decode(ids), text);
    }
  }

  std::string ranks() const { return ranks_of_tiktoken(model_); }

  json model_;
  std::vector<std::string> texts_;
  trireme::testing::Scratch scratch_;
};

TEST_F(FileFormats, Gpt2sTwoFiles) {
  scratch_.write("vocab.json", model_["vocab"].dump());
  scratch_.write("merges.txt", merges_txt_of(model_));
  expect_same_ids(load_tokenizer(scratch_.path("")));
}

TEST_F(FileFormats, Tiktokens) {
  expect_same_ids(tokenizer_from_tiktoken(scratch_.write("ranks.tiktoken", ranks()), "gpt2"));
}

TEST_F(FileFormats, TiktokensOfAKnownNameHaveSpecialTokens) {
  const Tokenizer tokenizer = load_tokenizer(scratch_.write("r50k_base.tiktoken", ranks()));
  expect_same_ids(tokenizer);
  EXPECT_EQ(end_token(tokenizer), 50256);
  EXPECT_EQ(tokenizer.vocab_size(), 50257);
  const std::vector<int32_t> ids = tokenizer.encode("a<|endoftext|>b");
  ASSERT_EQ(ids.size(), 3U);
  EXPECT_EQ(ids[1], 50256);
  EXPECT_EQ(tokenizer.decode(ids), "ab");
  const Tokenizer cl100k = load_tokenizer(scratch_.write("cl100k_base.tiktoken", ranks()));
  EXPECT_EQ(cl100k.encode("<|endofprompt|>"), std::vector<int32_t>{100276});
  const Tokenizer qwen = load_tokenizer(scratch_.write("qwen.tiktoken", ranks()));
  EXPECT_EQ(qwen.find_special("<|extra_204|>"), 151850);
  EXPECT_EQ(qwen.decode(qwen.encode("e\u0301")), "\u00e9");
}

/// Under another name the same ranks are another tokenizer.
TEST_F(FileFormats, TheDigestOfTiktokensHasTheirName) {
  const auto digest = [&](const std::string& name) {
    return tokenizer_digest(scratch_.write(name, "IQ== 0\n"));
  };
  EXPECT_NE(digest("r50k_base.tiktoken"), digest("cl100k_base.tiktoken"));
  EXPECT_EQ(digest("r50k_base.tiktoken"), digest("elsewhere/r50k_base.tiktoken"));
  EXPECT_EQ(digest("a.json"), digest("b.json"));
}

TEST_F(FileFormats, TiktokensThatAreNotKnownAreRefused) {
  EXPECT_THROW(load_tokenizer(scratch_.write("mine.tiktoken", ranks())), ConfigError);
  EXPECT_THROW(load_tokenizer(scratch_.write("p50k_base.tiktoken", ranks() + "YWJjZGVmZw== 50256\n")),
               DataError);
}

TEST_F(FileFormats, AFolderMeansItsTokenizerJson) {
  std::ifstream file(fixtures() + "/gpt2.json");
  scratch_.write("tokenizer.json", std::string(std::istreambuf_iterator<char>(file), {}));
  expect_same_ids(load_tokenizer(scratch_.path("")));
}

TEST_F(FileFormats, ThreadsGiveTheIdsOfOne) {
  const Tokenizer tokenizer = load_tokenizer(fixtures() + "/gpt2.json");
  const std::vector<std::string_view> views(texts_.begin(), texts_.end());
  const auto batch = encode_batch(tokenizer, views, 4);
  ASSERT_EQ(batch.size(), views.size());
  for (size_t i = 0; i < views.size(); ++i) EXPECT_EQ(batch[i], tokenizer.encode(views[i]));
}

}  // namespace
}  // namespace trireme::text::testing
