// Files that are damaged or ask for what there is not: the error says where, what was found and what to do.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "trireme/base/error.h"
#include "trireme/text/load.h"

namespace trireme::text::testing {
namespace {

using nlohmann::json;
using trireme::testing::Scratch;

class BrokenFile : public ::testing::Test {
 protected:
  json good(const std::string& name) const {
    std::ifstream file(fixtures() + "/" + name + ".json");
    return json::parse(file);
  }

  /// The message with which `content` is refused, by an error with this exit code.
  std::string refusal(const std::string& content, ExitCode code) const {
    const std::string path = scratch_.write("tokenizer.json", content);
    try {
      load_tokenizer(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), code) << error.what();
      const std::string message = error.what();
      EXPECT_TRUE(message.starts_with("[text.")) << message;
      EXPECT_NE(message.find(path), std::string::npos) << message;
      return message;
    }
    ADD_FAILURE() << "accepted: " << content.substr(0, 100);
    return {};
  }
  std::string damage(const json& content) const { return refusal(content.dump(), ExitCode::kCorruptData); }
  std::string lack(const json& content) const { return refusal(content.dump(), ExitCode::kUsage); }

  Scratch scratch_;
};

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << " in " << message;
}

TEST_F(BrokenFile, NamesAComponentThatThereIsNot) {
  json file = good("gpt2");
  file["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
  expect_words(lack(file), {"pre_tokenizer", "UnicodeScripts", "Metaspace"});
  file = good("gpt2");
  file["decoder"] = {{"type", "CTC"}};
  expect_words(lack(file), {"decoder", "CTC"});
  file = good("gpt2");
  file["model"]["type"] = "Neural";
  expect_words(lack(file), {"model", "Neural", "Unigram"});
}

TEST_F(BrokenFile, NamesAMergeWhosePartIsNoToken) {
  json file = good("gpt2");
  file["model"]["merges"].push_back({"nowhere", "b"});
  expect_words(damage(file), {"model: merge", "the left part 'nowhere'"});
}

TEST_F(BrokenFile, NamesPlaceAndTypesOfAWrongValue) {
  json file = good("gpt2");
  file["pre_tokenizer"]["use_regex"] = "yes";
  expect_words(damage(file), {"pre_tokenizer.use_regex", "string", "true or false"});
  file = good("unigram");
  file["model"]["vocab"][3] = 17;
  expect_words(damage(file), {"model.vocab", "at 3"});
  file = good("gpt2");
  file["added_tokens"][0]["id"] = -1;
  expect_words(damage(file), {"added_tokens[0]", "-1"});
}

TEST_F(BrokenFile, RefusesIdsThatWouldFillTheMemory) {
  json file = good("gpt2");
  file["model"]["vocab"]["x"] = 4000000000;
  expect_words(damage(file), {"model.vocab", "'x'", "outside"});
}

TEST_F(BrokenFile, RefusesTwoTokensOfOneId) {
  json file = good("bert");
  file["model"]["vocab"]["zzzz"] = 5;
  expect_words(damage(file), {"'zzzz'", "both have the id 5"});
}

TEST_F(BrokenFile, RefusesTokensAroundTextsThatThereAreNot) {
  json file = good("bert");
  file["post_processor"]["sep"][1] = 5000;
  expect_words(damage(file), {"post_processor", "5000", "vocabulary of"});
}

TEST_F(BrokenFile, RefusesSequencesWithoutEnd) {
  json file = good("gpt2");
  json nested = {{"type", "NFC"}};
  for (int i = 0; i < 20; ++i) nested = {{"type", "Sequence"}, {"normalizers", {nested}}};
  file["normalizer"] = nested;
  expect_words(damage(file), {"nested more than 16 deep"});
}

TEST_F(BrokenFile, RefusesWhatIsCutShort) {
  const std::string whole = good("gpt2").dump();
  expect_words(refusal(whole.substr(0, whole.size() / 2), ExitCode::kCorruptData), {"no JSON"});
  refusal("", ExitCode::kCorruptData);
  refusal("[]", ExitCode::kCorruptData);
}

TEST_F(BrokenFile, SaysWhereAPatternIsWrong) {
  json file = good("llama3");
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "(a|b"}};
  const std::string path = scratch_.write("tokenizer.json", file.dump());
  EXPECT_THROW(load_tokenizer(path), ConfigError);
}

TEST_F(BrokenFile, SaysThatAFolderHasNoTokenizer) {
  EXPECT_THROW(load_tokenizer(scratch_.path("")), ConfigError);
  EXPECT_THROW(load_tokenizer(scratch_.path("absent")), ConfigError);
}

TEST_F(BrokenFile, RefusesIdsOutsideTheVocabulary) {
  const Tokenizer tokenizer = load_tokenizer(fixtures() + "/gpt2.json");
  for (const int32_t id : {-1, static_cast<int32_t>(tokenizer.vocab_size())}) {
    EXPECT_THROW(tokenizer.decode(std::vector{id}), DataError);
  }
}

TEST_F(BrokenFile, RefusesTiktokenLinesThatAreNoTokens) {
  for (const char* line : {"IQ==", "IQ== x", "I! 0", "IQ== 0 0", " 0"}) {
    EXPECT_THROW(tokenizer_from_tiktoken(scratch_.write("a.tiktoken", line), "cl100k"), DataError) << line;
  }
  const std::string no_bytes = scratch_.write("b.tiktoken", "IQ== 0\n");
  EXPECT_THROW(tokenizer_from_tiktoken(no_bytes, "cl100k"), DataError);
  EXPECT_THROW(tokenizer_from_tiktoken(no_bytes, "latin"), ConfigError);
}

}  // namespace
}  // namespace trireme::text::testing
