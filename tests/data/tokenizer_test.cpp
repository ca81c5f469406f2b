#include "trireme/data/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

std::string every_byte() {
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text += static_cast<char>(byte);
  return text;
}

TEST(ByteTokenizer, GivesEveryByteItsOwnValueAndBack) {
  const auto tokenizer = make_tokenizer(plan::Tokenizer::kByte);
  const std::vector<int32_t> ids = tokenizer->encode(every_byte());
  ASSERT_EQ(ids.size(), 256u);
  for (int32_t i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), every_byte());
}

TEST(ByteTokenizer, SaysWhatItIs) {
  const auto tokenizer = make_tokenizer(plan::Tokenizer::kByte);
  EXPECT_EQ(tokenizer->name(), "byte");
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_EQ(tokenizer->document_separator(), 0);
  EXPECT_TRUE(tokenizer->encode("").empty());
}

TEST(ByteTokenizer, RefusesIdsOutsideTheVocabulary) {
  const auto tokenizer = make_tokenizer(plan::Tokenizer::kByte);
  for (const int32_t id : {-1, 256, 100000}) {
    const std::vector<int32_t> ids = {65, id};
    const std::string message = testing::message_of<DataError>([&] { tokenizer->decode(ids); });
    EXPECT_NE(message.find(std::to_string(id)), std::string::npos) << message;
  }
}

TEST(MakeTokenizer, MakesEachByTheNameThatAConfigGivesIt) {
  for (const plan::Tokenizer kind : plan::all_values<plan::Tokenizer>()) {
    EXPECT_EQ(make_tokenizer(kind)->name(), plan::name(kind));
  }
  EXPECT_THROW(make_tokenizer(static_cast<plan::Tokenizer>(99)), LogicError);
}

}  // namespace
}  // namespace trireme::data
