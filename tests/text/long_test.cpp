#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/text/expected.h"
#include "tests/text/fuzz.h"

namespace trireme::text::testing {
namespace {

constexpr uint64_t kTexts = 10'000'000;
constexpr uint64_t kOfAKind =
    2'500'000;  // files of four kinds, which are ten million in all; templates; patterns

/// Minutes of a core.
class TextLong : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("TRIREME_LONG_TESTS") == nullptr)
      GTEST_SKIP() << "ten million executions take minutes; set TRIREME_LONG_TESTS=1 to run them";
  }
};

TEST_F(TextLong, TokenizerJson) {
  fuzz_tokenizer_json(kOfAKind);
}

TEST_F(TextLong, Gpt2Files) {
  fuzz_gpt2_files(kOfAKind);
}

TEST_F(TextLong, SentencePieceModels) {
  fuzz_sentencepiece(kOfAKind);
}

TEST_F(TextLong, Tiktoken) {
  fuzz_tiktoken(kOfAKind);
}

TEST_F(TextLong, ChatTemplates) {
  fuzz_chat_templates(kOfAKind);
}

TEST_F(TextLong, Patterns) {
  fuzz_patterns(kOfAKind);
}

TEST_F(TextLong, Texts) {
  fuzz_texts(kTexts);
}

TEST_F(TextLong, EqualsPythonOnMegabytesOfText) {
  compare_with_python_here("--texts 20000 --length 60 --seed 3");
}

}  // namespace
}  // namespace trireme::text::testing
