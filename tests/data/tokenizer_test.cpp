#include "trireme/data/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/data/scratch.h"
#include "tests/data/tokenizer_fixture.h"
#include "trireme/base/error.h"
#include "trireme/text/load.h"

namespace trireme::data {
namespace {

std::string every_byte() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  return text;
}

TEST(ByteTokenizer, GivesEveryByteItsOwnValueAndBack) {
  const auto tokenizer = make_tokenizer("byte");
  const std::vector<int32_t> ids = tokenizer->encode(every_byte());
  ASSERT_EQ(ids.size(), 256u);
  for (int32_t i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), every_byte());
}

TEST(ByteTokenizer, SaysWhatItIs) {
  const auto tokenizer = make_tokenizer("byte");
  EXPECT_EQ(tokenizer->name(), "byte");
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_EQ(tokenizer->document_separator(), 0);
  EXPECT_TRUE(tokenizer->encode("").empty());
}

TEST(ByteTokenizer, RefusesIdsOutsideTheVocabulary) {
  const auto tokenizer = make_tokenizer("byte");
  for (const int32_t id : {-1, 256, 100000}) {
    const std::vector<int32_t> ids = {65, id};
    const std::string message = testing::message_of<DataError>([&] { tokenizer->decode(ids); });
    EXPECT_NE(message.find(std::to_string(id)), std::string::npos) << message;
  }
}

const std::string kStory = "Once upon a time, the rowers had a caf\xc3\xa9.\n";

TEST(FileTokenizer, GivesTheIdsOfItsFileAndBack) {
  const auto tokenizer = make_tokenizer(testing::kLlama2);
  const text::Tokenizer file = text::load_tokenizer(testing::kLlama2);
  const std::vector<int32_t> ids = tokenizer->encode(kStory);
  EXPECT_EQ(ids, file.encode(kStory));
  EXPECT_EQ(tokenizer->decode(ids), kStory);
  EXPECT_EQ(tokenizer->vocab_size(), file.vocab_size());
  EXPECT_EQ(tokenizer->document_separator(), file.find("</s>"));
  EXPECT_EQ(tokenizer->end_token(), file.find("</s>"));
}

TEST(FileTokenizer, IsWhatItsFileHoldsWhateverItsName) {
  const testing::Scratch scratch;
  const std::string json = testing::slurp(testing::kLlama2);
  const auto first = make_tokenizer(testing::kLlama2),
             renamed = make_tokenizer(scratch.write("mine.json", json)),
             changed = make_tokenizer(scratch.write("llama2.json", json + "\n"));
  EXPECT_EQ(first->name(), "llama2.json (" + first->digest() + ")");
  EXPECT_EQ(renamed->name(), "mine.json (" + first->digest() + ")");
  EXPECT_EQ(renamed->digest(), first->digest());
  EXPECT_NE(changed->digest(), first->digest());
}

TEST(FileTokenizer, ContinuesAPromptWithTheSpaceThatATextWouldLose) {
  const auto tokenizer = make_tokenizer(testing::kLlama2);
  const std::vector<int32_t> ids = tokenizer->encode("Once upon a time the rowers pull");
  for (size_t cut = 1; cut < ids.size(); ++cut) {
    const std::span prompt = std::span(ids).first(cut), rest = std::span(ids).subspan(cut);
    EXPECT_EQ(tokenizer->decode(prompt) + decode_after(*tokenizer, prompt, rest), tokenizer->decode(ids));
  }
}

TEST(FileTokenizer, NeedsATokenThatEndsDocuments) {
  const std::string message =
      testing::message_of<ConfigError>([] { make_tokenizer(TRIREME_TEXT_FIXTURES "/mistral.json"); });
  for (const char* part : {"mistral.json", "<|endoftext|>", "</s>", "added_tokens"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
}

TEST(FileTokenizer, RefusesPathsWithoutATokenizer) {
  const testing::Scratch scratch;
  EXPECT_THROW(make_tokenizer(scratch.path("none.json")), ConfigError);
  EXPECT_THROW(make_tokenizer(scratch.path("")), ConfigError) << "an empty folder";
  EXPECT_THROW(make_tokenizer(scratch.write("ranks.tiktoken", "IQ== 0\n")), ConfigError);
}

}  // namespace
}  // namespace trireme::data
